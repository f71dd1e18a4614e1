"""What is refused: for each route fields, the field that the error names, and what it says."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import RunningServer

USER = {"role": "user", "content": "a"}
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": [USER], "max_tokens": 5},
}
"""What these routes need; a field of a case that is ``ABSENT`` is left out."""
ABSENT = object()
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "g"}}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def of_user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


VALUES: dict[str, tuple[Any, ...]] = {
    "prompt": (
        *("", [], ["a", ""], [[1], []], ["a", [1]], [1, "a"], [True], 5, None, [2**70], True, {}),
        *(1.0, ["a", 1], [1, True], [1, 2.0], [1, None], [[1], "a"], [[1], [True]], [[[1]]]),
        *([1, 2**31], [1, -(2**31)], [[1], 2], ["a", None], [-1], [[-1, 3]], [0x110000], ABSENT),
        *("x" * 600, ["a", "x" * 600]),
    ),
    "max_tokens": (-1, 0, "many", 600),
    "max_completion_tokens": (-1, 600, 2**63),
    "min_tokens": (20,),
    "temperature": (-1, "hot"),
    "top_p": (0, 1.5),
    "top_k": (-5, 2**70),
    "min_p": (2,),
    "n": (0,),
    "seed": (2**70,),
    "stop": (5, [""], ["x" * 1001]),
    "logprobs": (21,),
    "kv_policy": (7,),
    "stream_options": ({"include_usage": True},),
    "request_id": ("a\r\nb",),
    "suffix": ("b",),
    "best_of": (3,),
    "logprob_token_ids": ([3],),
    "prompt_embeds": ("AAAA",),
    "repetition_detection": ({"min_count": 3},),
    "truncation_side": ("middle",),
    "include_reasoning": (False,),
    "use_beam_search": (True,),
    "guided_regex": ("",),
    "structured_outputs": ({"xml": "a"}, {}, {"regex": "a", "json": {}}, {"choice": []}),
    "response_format": ({"type": "xml"},),
    "prompt_logprobs": (21,),
    "truncate_prompt_tokens": (0,),
    "tools": ([{"type": "function"}],),
    "thinking_token_budget": (5,),
    "allowed_token_ids": ([],),
    "bad_words": ([""],),
    "stop_token_ids": ([*range(129)], [2**61]),
    "logit_bias": ({str(2**70): 1}, {"5": 101}),
    "priority": (2**70,),
    "presence_penalty": (3,),
    "frequency_penalty": (-2.5,),
    "repetition_penalty": (0.0,),
    "kv_resume": ([],),
    "cache_salt": ([],),
}
"""Values of fields of a completion, of which each is refused under the field's name."""

STREAMS = {"stream", "stream_options", "prompt_logprobs"}
"""Fields that a stream allows or forbids: the others are sent both ways."""
Case = tuple[Any, ...]
ELSEWHERE: list[Case] = [
    ({name: value}, name, f"{name} goes with")
    for name, value in {
        "n": 2,
        "kv_trace": True,
        "return_token_ids": True,
        "prompt_logprobs": 0,
    }.items()
]
"""What answers in the forms of other APIs cannot hold."""
REFUSED: dict[str, list[Case]] = {
    "/v1/completions": [
        *(({name: value}, name) for name, values in VALUES.items() for value in values),
        ({"stop_token_ids": ["x"]}, "stop_token_ids[0]"),
        ({"kv_policy": {"name": "kara", "windw": 3}}, "kv_policy.windw"),
        ({"kv_policy": {"name": "kara", "window": 513}}, "kv_policy.window"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex"),
        ({"structured_outputs": {"json": {}}, "min_tokens": 1}, "min_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": [2**70]}, "allowed_token_ids[0]"),
        ({"min_tokens": 2**70, "max_tokens": None}, "min_tokens"),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ABSENT}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": of_user({"type": "image_url", "image_url": {}})}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        *(
            ({"tools": TOOLS, "tool_choice": choice}, "tool_choice", word)
            for choice, word in (
                ({"type": "web_search"}, "no tool of type 'web_search'"),
                ({"type": "function"}, "the function's name"),
                ({"type": "allowed_tools"}, "allowed_tools have a mode"),
                ({"type": "allowed_tools", "mode": "required", "tools": []}, "needs tools"),
                ("sometimes", "or an object that names"),
                (5, "got 5"),
            )
        ),
        (tool(name="a b"), "tools[0].function.name", "name must match pattern"),
        ({"guided_json": 5}, "guided_json", "must be a string or an object, got 5"),
        ({"messages": of_user({"type": "text"})}, "messages[0].content", "need a text"),
        *(
            (tool(name="f", parameters={"type": kind}), "tools[0].function.parameters", "of an obj")
            for kind in ("string", "array", "null", ["null"], 5)
        ),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"echo": True}, "echo"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"refuse": True}}, "messages"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
    "/v1/responses": [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole history"),
        ({"conversation": "a"}, "conversation", "whole history"),
        ({"background": True}, "background", "fetched later"),
        ({"prompt": {"id": "a"}}, "prompt", "instructions"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/chat/completions"),
        ({"include": ["message.output_text.logprobs"]}, "include", "/v1/chat/completions"),
        *(({"include": wrong}, "include") for wrong in (5, 0, "", {"a": 1})),
        # Under the names that fields have here, not those of the chat request made of them.
        ({"reasoning": {"effort": "lots"}}, "reasoning"),
        ({"text": {"format": {}}}, "text.format", "text.format.type must be"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "text.format needs"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "must match pattern"),
        ({"tool_choice": 5}, "tool_choice", "must be a string or an object, got 5"),
        ({"input": [{"type": "function_call"}]}, "input[0].tool_calls[0].name"),
        ({"max_output_tokens": 2**63}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "function_call_output", "output": [5]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "store=false"),
        ({"input": [{"type": ["x"]}]}, "input"),
        ({"input": of_user({"type": ["x"]})}, "input"),
        ({"input": of_user({"type": "input_image"})}, "input"),
        ({"input": [{"role": "king", "content": "a"}]}, "input[0].role"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'"),
        ({"temperature": 200}, "temperature"),
        *ELSEWHERE,
        ({"kv_policy": {"name": "kara", "windw": 1}}, "kv_policy.windw"),
    ],
    "/v1/messages": [
        *(
            ({"thinking": {"type": kind}, "chat_template_kwargs": value}, "chat_template_kwargs")
            for kind in ("enabled", "disabled", "adaptive")
            for value in ("x", "", 1.5, 0, [1], [])
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": of_user({"type": "image"})}, "messages", "'image'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role"),
        ({"messages": of_user({"type": "tool_result", "content": 5})}, "messages", "tool_result"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
            *("tools[0].input_schema", "input_schema must be"),
        ),
        ({"messages": [5]}, "messages[0]", "must be an object, got 5"),
        ({"messages": of_user(5)}, "messages[0].content[0]", "must be an object, got 5"),
        ({"system": 5}, "system", "must be a string or a list, got 5"),
        *ELSEWHERE,
        ({"stop_sequences": "a"}, "stop_sequences"),
    ],
    "/detokenize": [({"tokens": [-1]}, "tokens")],
    "/abort_requests": [({}, "request_ids")],
}


def check(response: httpx.Response, status: int, param: str | None = None, code: str = "") -> str:
    """The error's message; the body has the one shape that clients of the route know."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["X-Request-Id"]
    body = response.json()
    assert body.pop("type", None) == ("error" if "/v1/messages" in response.url.path else None)
    [(key, error)] = body.items()
    assert key == "error"
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["code"] and error["type"]
    assert error["code"] == code or not code
    assert "Traceback" not in error["message"]
    message: str = error["message"]
    return message


@pytest.mark.parametrize(
    ("route", "case"), [(route, case) for route, cases in REFUSED.items() for case in cases]
)
def test_a_refusal_names_its_field(server: RunningServer, route: str, case: Case) -> None:
    fields, param, *words = case
    body = {**LEAST.get(route, {}), **fields}
    body = {name: value for name, value in body.items() if value is not ABSENT}
    ways = [{}, {"stream": True}] if route in LEAST and not fields.keys() & STREAMS else [{}]
    for way in ways:
        content = json.dumps({**body, **way})
        headers = {"Content-Type": "application/json"}
        message = check(server.http.post(route, content=content, headers=headers), 400, param)
        assert any(word in message for word in words or re.findall(r"[a-z_]+", param))
    assert server.complete("next", max_tokens=1).status_code == 200


def test_an_unknown_model(server: RunningServer) -> None:
    others: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [97]},
    }
    for path, body in {**LEAST, **others}.items():
        response = server.post(path, model="gpt-9", **body)
        assert "gpt-9" in check(response, 404, "model", "model_not_found")
        assert response.json()["error"]["type"] == "not_found_error"
    check(server.http.get("/v1/models/gpt-9"), 404, "model", "model_not_found")
    for get in (server.openai().models.retrieve, server.openai().responses.retrieve):
        with pytest.raises(openai.NotFoundError):
            get("gpt-9")
