"""Bodies and bytes that nobody foresaw, against an application with a fake engine and a real one.

The fake engine is quick: what is looked for here are faults of reading, which have nothing to do
with a model. `tests/server/corpus.jsonl` keeps every body that ever broke something.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.soak.malformed import (
    FIELDS,
    INTEGERS,
    POLICIES,
    POLICY_FIELDS,
    ROUTES,
    answer_to,
    malformed,
    raw,
)
from tests.server.conftest import MODEL, RunningServer

# The same bodies each time; `make test-long` draws others.
QUICK = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WHOLE = settings(QUICK, max_examples=20_000, derandomize=False)

numbers = st.one_of(st.integers(), st.sampled_from(INTEGERS), st.floats(), st.booleans(), st.none())
texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates among them
values = st.recursive(
    st.one_of(numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), texts), inner, max_size=4),
    ),
    max_leaves=8,
)
policies = st.builds(
    lambda name, fields: {**fields, "name": name},
    st.one_of(st.sampled_from(POLICIES), values),
    st.dictionaries(st.sampled_from(POLICY_FIELDS), values, max_size=4),
)
requests = st.builds(
    lambda some, policy: {"model": MODEL, "prompt": "a", "max_tokens": 2, **some, **policy},
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=5),
    st.one_of(st.just({}), st.builds(lambda policy: {"kv_policy": policy}, policies)),
)
conversations = st.builds(
    lambda some, messages: {"max_tokens": 2, **some, "messages": messages},
    st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
    st.lists(
        st.builds(
            lambda role, content, some: {**some, "role": role, "content": content},
            st.one_of(st.sampled_from(("user", "system", "assistant", "tool")), values),
            values,
            st.dictionaries(st.sampled_from(("tool_calls", "name", "reasoning")), values),
        ),
        max_size=3,
    ),
)


def well(server: RunningServer, answer: httpx.Response) -> None:
    """No 5xx, one shape of errors, no word of what is inside."""
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert not any(word in error["message"] for word in ("Traceback", "panick", ".rs:"))
        assert answer.headers["X-Request-Id"]


def post(server: RunningServer, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    well(server, server.http.post(path, content=content, headers=headers))


bodies = st.one_of(values, requests, conversations)


@given(body=bodies, path=st.sampled_from(ROUTES))
@QUICK
def test_any_body_for_any_route(server: RunningServer, body: Any, path: str) -> None:
    post(server, path, body)


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_malformed_bodies(server: RunningServer, first: int) -> None:
    for seed in range(first, first + 100):
        wrong = malformed(seed)
        headers = {"Content-Type": wrong.content_type}
        well(server, server.http.post(wrong.path, content=wrong.body, headers=headers))


def test_bytes_that_are_no_http(server: RunningServer) -> None:
    for seed in range(300):
        assert not answer_to(server.url, raw(seed)).startswith("5"), raw(seed)
    assert server.http.get("/health").status_code == 200


@pytest.mark.slow
@given(body=bodies, path=st.sampled_from(ROUTES))
@WHOLE
def test_twenty_thousand_bodies(server: RunningServer, body: Any, path: str) -> None:
    post(server, path, body)
