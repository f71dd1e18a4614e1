"""Every body that ``/openapi.json`` describes, or nearly does: 2xx, or a 4xx that names a field.

Bodies are drawn from the document itself, so a field that is added is tested from then on. Others,
and bytes that are no HTTP, are made without it. The fake engine is quick: faults of reading have
nothing to do with a model. `tests/server/corpus.jsonl` keeps what ever broke something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.soak.fields import bodies as large
from bench.soak.malformed import answer_to, malformed, raw
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.server.fake_engine import FakeEngine
from tests.thinning import slow

# The same bodies each time; `make test-long` draws others.
QUICK = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WHOLE = settings(QUICK, max_examples=3000, derandomize=False)
ROUTES = (
    *("/v1/completions", "/v1/chat/completions"),
    *("/v1/responses", "/v1/responses/input_tokens"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/tokenize", "/detokenize", "/abort_requests"),
)
ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=12),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_NUMBERS = st.one_of(st.integers(-2, 40), st.sampled_from((2**31, 2**63, -(2**63))))
_NO_FIELD = {"context_length_exceeded", "queue_full", "too_many_policies", "busy"}
"""Codes of refusals that are about a whole request."""


@pytest.fixture(scope="module")
def served() -> Iterator[RunningServer]:
    yield from run_server(FakeEngine())


@pytest.fixture(scope="module")
def document(served: RunningServer) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/openapi.json").json()
    return found


def test_every_body_of_the_document_is_drawn(document: dict[str, Any]) -> None:
    with_body = {
        path
        for path, methods in document["paths"].items()
        if any("requestBody" in each for each in methods.values())
    }
    assert with_body == set(ROUTES)


@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@QUICK
def test_a_body_is_answered_or_its_field_named(
    path: str, served: RunningServer, document: dict[str, Any], data: st.DataObject
) -> None:
    judge(path, served, document, data)


@pytest.mark.parametrize("seeds", [range(400), *slow(range(400, 20_000))], ids=str)
def test_malformed_bodies(served: RunningServer, seeds: range) -> None:
    """No 5xx, one shape of errors, no word of what is inside."""
    for seed in seeds:
        wrong = malformed(seed)
        headers = {"Content-Type": wrong.content_type}
        answer = served.http.post(wrong.path, content=wrong.body, headers=headers)
        assert answer.status_code < 500, (seed, answer.text)
        if not answer.is_success:
            error = answer.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert not any(word in error["message"] for word in ("Traceback", "panick", ".rs:"))
            assert answer.headers["X-Request-Id"]


def test_bytes_that_are_no_http(served: RunningServer) -> None:
    for seed in range(300):
        assert not answer_to(served.url, raw(seed)).startswith("5"), raw(seed)
    assert served.http.get("/health").status_code == 200


def test_every_field_may_be_large(served: RunningServer, document: dict[str, Any]) -> None:
    """``python -m bench.soak.fields`` measures what each costs; here each is answered."""
    sent = list(large(document, 20_000))
    fields = {(body.path, body.field.partition(".")[0].partition("(")[0]) for body in sent}
    for path in ROUTES:
        for name, schema in schema_of(path, document)["properties"].items():
            several = schema.get("anyOf", [schema])
            kinds = {one.get("type") for one in several if "enum" not in one}
            assert (path, name) in fields or not kinds & {"array", "object", "string"}, (path, name)
    headers = {"Content-Type": "application/json"}
    for body in sent:
        answer = served.http.post(body.path, content=body.text, headers=headers)
        assert answer.status_code < 500, (body.path, body.field, body.fill, answer.text[:300])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", ROUTES)
@given(data=st.data())
@WHOLE
def test_three_thousand_bodies_a_route(
    path: str, served: RunningServer, document: dict[str, Any], data: st.DataObject
) -> None:
    judge(path, served, document, data)


def judge(path: str, served: RunningServer, document: dict[str, Any], data: st.DataObject) -> None:
    """Send a drawn body and look at the answer."""
    body = data.draw(bodies(schema_of(path, document), document))
    answer = served.http.post(path, json=body)
    if answer.is_success:
        return
    assert 400 <= answer.status_code < 500, (body, answer.text)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["message"]
    properties = schema_of(path, document)["properties"]
    assert properties, "the document says nothing of this body"
    if error["code"] not in _NO_FIELD:  # it names a field of the document, or one that was sent
        assert error["param"], (body, answer.text)
        first = error["param"].replace("[", ".").split(".")[0]
        sent = body if isinstance(body, dict) else ()
        assert first in {*properties, *sent, "body"}, (first, body, answer.text)


def schema_of(path: str, document: dict[str, Any]) -> dict[str, Any]:
    """The body's schema; of a body that is one of several, the fields of all of them."""
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = resolved(content["schema"], document)
    several = [resolved(each, document) for each in schema.get("anyOf", ())]
    if not several:
        return schema
    merged = {name: each for one in several for name, each in one["properties"].items()}
    return {"type": "object", "properties": merged}


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


# ---- bodies -------------------------------------------------------------------------------------


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any], document: dict[str, Any]) -> Any:
    """What the schema allows with some of its fields, and now and then one that it does not."""
    properties = schema.get("properties", {})
    names = draw(st.lists(st.sampled_from(sorted(properties)), max_size=4)) if properties else []
    chosen = [*schema.get("required", ()), *names]
    body = {name: draw(values(properties[name], document)) for name in dict.fromkeys(chosen)}
    body = {**body, **({"model": MODEL} if "model" in body and draw(st.booleans()) else {})}
    if body and draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted(body)))] = draw(ANYTHING)
    if body and draw(st.integers(0, 15)) == 0:
        del body[draw(st.sampled_from(sorted(body)))]
    return body


def values(
    schema: dict[str, Any], document: dict[str, Any], depth: int = 0
) -> st.SearchStrategy[Any]:
    """Values of a schema, as far as the document's own words go."""
    schema = resolved(schema, document)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(choice, document, depth) for choice in choices])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return objects(schema, document, depth)
    if kind == "array":
        items = values(schema.get("items", {}), document, depth + 1)
        return st.lists(items, max_size=0 if depth > 3 else 3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        "string": st.text(max_size=12),
        "integer": _NUMBERS,
        "number": st.one_of(_NUMBERS, st.floats(-3, 3)),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return simple.get(kind, ANYTHING)


def objects(
    schema: dict[str, Any], document: dict[str, Any], depth: int
) -> st.SearchStrategy[dict[str, Any]]:
    properties, required = schema.get("properties", {}), set(schema.get("required", ()))
    if not properties or depth > 3:
        return st.dictionaries(st.text(max_size=6), ANYTHING, max_size=2)
    made = {name: values(each, document, depth + 1) for name, each in properties.items()}
    return st.fixed_dictionaries(
        {name: each for name, each in made.items() if name in required},
        optional={name: each for name, each in made.items() if name not in required},
    )


def test_the_schemas_words_are_understood(document: dict[str, Any]) -> None:
    """A word that the strategies do not know would be drawn as anything, and say nothing."""
    text = json.dumps(document["components"]["schemas"])
    for word in ("allOf", "patternProperties", "prefixItems", "if", "dependentSchemas"):
        assert f'"{word}": ' not in text, word
