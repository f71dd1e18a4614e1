"""Random bounded schemas: whatever finishes by itself is valid, for the shipped model too."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from kvserve import LLM, SamplingParams
from kvserve.log import RequestError
from kvserve.server.openai.structured import one_call
from tests.grammars import takes

KEYS = ("name", "age", "tags", "a b", "größe", 'q"')


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose documents are short: every string, list and number has its limits."""
    kinds = ["string", "integer", "boolean", "null", "enum", "const", "pattern", "number"]
    if depth < 3:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "object":
        keys = rng.sample(KEYS, rng.randint(0, 3))
        required = [key for key in keys if rng.random() < 0.7]
        properties = {key: random_schema(rng, depth + 1) for key in keys}
        schema: dict[str, Any] = {"type": "object", "properties": properties}
        return {**schema, "required": required, "additionalProperties": False}
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
    if kind == "string":
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
    if kind in ("integer", "number"):
        least = rng.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 200)}
    if kind == "enum":
        return {"enum": rng.sample(["x", "y z", 1, -2, True, None, "ü"], rng.randint(1, 3))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 7, False])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f]{2,4}$", "^(no|yes)$", "^x-\\d$"])}
    return {"type": kind}


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_documents_are_valid(count: int) -> None:
    llm = LLM("kvserve/tiny", max_model_len=600, policy={"name": "kara", "window": 48, "buffer": 8})
    rng = random.Random(count)
    schemas = [random_schema(rng) for _ in range(count)]
    params = [
        SamplingParams(structured_outputs={"json": schema}, max_tokens=400, seed=i)
        for i, schema in enumerate(schemas)
    ]
    finished = 0
    for schema, output in zip(
        schemas, llm.generate(["Find it:"] * count, params, use_tqdm=False), strict=True
    ):
        [choice] = output.outputs
        if choice.finish_reason == "stop":
            finished += 1
            jsonschema.validate(json.loads(choice.text), schema)
    assert finished == count
    assert llm.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/$defs/nowhere"},
        {"minimum": 5, "maximum": 4, "type": "integer"},
    ],
)
def test_what_the_backend_cannot_hold_to_is_refused(schema: dict[str, Any]) -> None:
    llm = LLM("kvserve/tiny", max_model_len=200)
    with pytest.raises(RequestError) as refused:
        llm.generate("a", SamplingParams(structured_outputs={"json": schema}), use_tqdm=False)
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # xgrammar 0.2.8 passes over a keyword without type, and over one beside $ref.
        ({"minimum": 5}, "5", "4"),
        ({"minLength": 2}, '"ab"', '"a"'),
        ({"required": ["a"]}, '{"a": 1}', "{}"),
        ({"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}}, "5", "4"),
        # It writes 0.1 in 17 digits, and refuses 1e-7 as decimals.
        ({"const": 0.1}, "0.1", "0.10000000000000001"),
        ({"type": "number", "minimum": 1e-7}, "0.0000001", "0.00000009"),
        # It escapes nothing in a string that has a length, and reads a pattern against the text.
        ({"type": "string", "maxLength": 9}, r'"a\"b"', '"a\tb"'),
        ({"type": "string", "pattern": '^a"b$'}, r'"a\"b"', '"a"b"'),
        # outlines-core 0.2.14 makes ("a|b") of this pattern, and drops one beside a length.
        ({"type": "string", "pattern": "^a|b$"}, '"a"', '"a'),
        ({"type": "string", "pattern": "^a*$", "minLength": 2}, '"aa"', '"xy"'),
        ({"type": "integer", "minimum": 5, "multipleOf": 2}, "6", "7"),
        # jsonschema 4.26.0 says that this is no multiple.
        ({"type": "number", "multipleOf": 0.01}, "19.99", "19.999"),
        ({"const": [1, {"a": 2}]}, '[1, {"a": 2}]', '[1,{"a":2}]'),
    ],
)
def test_what_other_libraries_pass_over_is_kept(
    schema: dict[str, Any], right: str, wrong: str
) -> None:
    assert takes(schema, right)
    assert not takes(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "wrong"),
    [
        ({"type": "integer", "minimum": 3}, "2"),
        ({"type": ["string", "integer"], "maxLength": 1}, '"ab"'),
        ({"type": "string", "enum": ["up"]}, '"down"'),
        ({"anyOf": [{"type": "integer"}, {"const": "a"}]}, '"b"'),
    ],
)
def test_nullable_means_null_too(schema: dict[str, Any], wrong: str) -> None:
    """As transformers' ``get_json_schema`` writes an argument that may be None."""
    assert takes({**schema, "nullable": True}, "null")
    assert not takes({**schema, "nullable": True}, wrong)
    assert not takes({**schema, "nullable": False}, "null")


def test_arguments_as_a_whole_are_never_null() -> None:
    count = {"type": "integer", "nullable": True}
    given = {"type": "object", "properties": {"count": count}, "nullable": True}
    schema = json.loads(one_call({"name": "f", "parameters": given}).value)
    assert takes(schema, '{"count": null}')
    assert not takes(schema, "null")
