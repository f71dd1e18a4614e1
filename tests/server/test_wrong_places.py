"""Agents' requests with a wrong value in each place: refused with a sentence, or answered.

Histories are lists of free objects, which the OpenAPI document cannot describe: what makes bodies
from it (test_openapi_bodies.py) does not get into them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fastapi.exceptions import RequestValidationError

from kvserve.log import RequestError
from kvserve.server.anthropic.request import MessagesRequest
from kvserve.server.http.json_body import read_body
from kvserve.server.openai.chat_protocol import ChatCompletionRequest
from kvserve.server.openai.responses_protocol import ResponsesRequest
from kvserve.server.state.errors import as_api_error
from tests.server import test_messages
from tests.server.conftest import MODEL, RunningServer
from tests.server.openai import test_chat, test_responses

ABSENT = object()
VALUES: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**30, 1.5, "", "\0", "x", "auto", "null"),
    *([], {}, [[]], [None], ["x"], [{}], {"a": 1}, {"type": "text"}, {"type": ["x"]}, {"": 0}),
    ABSENT,
]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s", "name": "z"},
            *test_chat.HISTORY,
            {"role": "assistant", "content": "x", "function_call": {"name": "f"}},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ],
        "tools": [test_chat.TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        **{"stop": ["zz"], "logprobs": True, "top_logprobs": 2, "n": 2, "logit_bias": {"5": 1}},
        **{"chat_template_kwargs": {"a": 1}, "parallel_tool_calls": True, "max_tokens": 2},
    },
    "/v1/responses": {
        **{"input": test_responses.HISTORY, "instructions": "i", "tools": [test_responses.TOOL]},
        **{"tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 2},
        **{"text": {"format": {"type": "text"}}, "reasoning": {"effort": None}},
        **{"include": ["a"], "metadata": {"a": "b"}},
    },
    "/v1/messages": {
        **test_messages.SECOND_TURN,
        "tool_choice": {"type": "tool", "name": "weather"},
        **{"thinking": {"type": "enabled", "budget_tokens": 9}, "stop_sequences": ["zz"]},
        "chat_template_kwargs": {"a": 1},
    },
}
KINDS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
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


@pytest.mark.parametrize("route", BODIES)
def test_no_field_is_used_before_it_is_read(route: str) -> None:
    """Of ``chat_template_kwargs`` beside ``thinking`` a text was a 500: the fields of the chat
    request that another one stands for are read only when it is made."""
    kind: Any = KINDS[route]
    names = {*kind.model_fields, *kind.further_fields, "unheard_of"}
    refused = 0
    for name in sorted(names):
        for value in VALUES[1:-1]:
            raw = orjson.dumps({**BODIES[route], name: 1e300 if value == 10**30 else value})
            try:
                body: Any = read_body(raw, (kind,), 2000)
                if route == "/v1/messages":
                    body.as_chat(True)
                elif route == "/v1/responses":
                    body.as_chat()
            except (RequestError, RequestValidationError) as error:
                assert len(as_api_error(error).message) > 10, (name, value)
                refused += 1
    assert refused > 100
