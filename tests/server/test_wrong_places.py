"""Agents' requests with a wrong value in each place: refused with a sentence, or answered.

Histories are lists of free objects, which the OpenAPI document cannot describe: what makes bodies
from it (test_openapi_bodies.py) does not get into them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import MODEL, RunningServer

ABSENT = object()
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**30, 1.5, "", "\0", "x", "auto", "null"),
    *([], {}, [[]], [None], ["x"], [{}], {"a": 1}, {"type": "text"}, {"type": ["x"]}, {"": 0}),
    ABSENT,
]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}, "c": {"enum": ["a"]}},
    "required": ["n"],
}
NAMED = {"name": "f", "description": "d"}
FUNCTION = {"type": "function", "function": {**NAMED, "parameters": SCHEMA}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"n": 1}}
SEEN = {"type": "image", "source": {"type": "base64", "data": "A"}}
TEXT = {"type": "text", "text": "a"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s", "name": "z"},
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "5", "name": "f"},
            {"role": "assistant", "content": "x", "function_call": CALL["function"]},
            {"role": "user", "content": "b"},
        ],
        **{"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        **{"stop": ["zz"], "logprobs": True, "top_logprobs": 2, "n": 2, "logit_bias": {"5": 1}},
        **{"chat_template_kwargs": {"a": 1}, "parallel_tool_calls": True, "max_tokens": 2},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "t", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"n": 1}'},
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_text", "text": "5"}, {"type": "input_image"}],
            },
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "y"},
            {"type": "web_search_call", "id": "w"},
            {"role": "user", "content": "b"},
        ],
        **{"instructions": "i", "tools": [{"type": "function", **NAMED, "parameters": SCHEMA}]},
        **{"tool_choice": {"type": "function", "name": "f"}, "text": {"format": {"type": "text"}}},
        **{"reasoning": {"effort": None}, "include": ["a"], "metadata": {"a": "b"}},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "system": [{**TEXT, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, TEXT, USE]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": [TEXT, SEEN]},
                    {"type": "document", "source": {"type": "text", "data": "d"}},
                ],
            },
        ],
        **{
            "tools": [{**NAMED, "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
        },
        **{"thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["zz"]},
        **{"output_config": {"effort": "low"}, "metadata": {"user_id": "u"}, "max_tokens": 2},
    },
}


@pytest.fixture
def server(thinking: RunningServer) -> RunningServer:
    return thinking


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(body)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    if value is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return made


@pytest.mark.parametrize("route", BODIES)
def test_no_place_ends_a_request_without_a_sentence(server: RunningServer, route: str) -> None:
    body = {"model": MODEL, **BODIES[route]}
    assert server.http.post(route, json=body).status_code == 200
    cases = [(path, value) for path in places(body) for value in VALUES]
    statuses = set()
    for path, value in random.Random(route).sample(cases, 350):
        stream = {"stream": True} if len(path) % 2 else {}
        answer = server.http.post(route, json={**put(body, path, value), **stream})
        where = f"{path} = {value!r}: {answer.text[:300]}"
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), where
        if answer.status_code == 200:
            assert '"internal_error"' not in answer.text and '"api_error"' not in answer.text, where
        else:
            message = answer.json()["error"]["message"]
            assert 10 < len(message) < 400 and "Traceback" not in message, where
    assert {200, 400} <= statuses
