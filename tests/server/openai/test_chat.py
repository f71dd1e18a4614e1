"""Chat answers in parts: reasoning and tool calls, whole and streamed, with the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvserve.engine.frontend.chat_template import Forms
from kvserve.engine.frontend.efforts import SCALE, Reasons
from kvserve.log import ConfigError
from tests.server.conftest import MODEL, RunningServer, StartServer, payloads
from tests.server.fake_engine import END, FakeEngine, FakeTokenizer

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}},
                       "$defs": {"City": {"type": "string"}}},
    },
}  # fmt: skip
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "w?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def ask(server: RunningServer, says: str, stream: bool, **more: Any) -> tuple[Any, list[Any]]:
    """(message, finish reasons) of one answer, put together from its chunks where streamed."""
    messages: Any = [{"role": "user", "content": f"SAY[{says}]"}]
    create = server.openai().chat.completions.create
    if not stream:
        [choice] = create(model=MODEL, messages=messages, **more).choices
        message = choice.message.model_dump()
        calls = [call["function"] for call in message["tool_calls"] or ()]
        return {**message, "tool_calls": calls}, [choice.finish_reason]
    whole: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": ""}
    calls = []
    reasons: list[Any] = []
    for chunk in create(model=MODEL, messages=messages, stream=True, **more):
        delta = chunk.choices[0].delta.model_dump(exclude_none=True)
        for name in ("content", "reasoning", "reasoning_content"):
            whole[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"]
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        reasons += filter(None, [chunk.choices[0].finish_reason])
    return {**{k: v or None for k, v in whole.items()}, "tool_calls": calls}, reasons


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_content_and_calls(thinking: RunningServer, stream: bool) -> None:
    message, reasons = ask(thinking, f"<think>hm\nhm</think>\n\nLook: {CALL}", stream, tools=[TOOL])
    assert message["reasoning"] == message["reasoning_content"] == "hm\nhm"
    assert message["content"] == "Look: "
    [call] = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Bern"})
    assert reasons == ["tool_calls"]
    seen = thinking.params
    assert seen.thinking_end == END and seen.structured_output is None


@pytest.mark.parametrize(
    ("says", "body", "count"),
    [
        ("<think>ab</think>cd", {}, len("<think>ab</think>") - 1),
        ("<think>ab", {}, len("<think>ab")),
        ("cd</think>", {}, 0),
        ("<think>ab</think>", {"chat_template_kwargs": {"close": True}}, 0),
        ("<think>ab</think>", {"n": 2}, 2 * (len("<think>ab</think>") - 1)),
    ],
)
def test_reasoning_tokens_are_counted(
    thinking: RunningServer, says: str, body: dict[str, Any], count: int
) -> None:
    answer = thinking.chat(f"SAY[{says}]", **body).json()
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    options = {"include_usage": True}
    answer = thinking.chat(f"SAY[{says}]", stream=True, stream_options=options, **body)
    usage = payloads(answer)[-1]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}
    if not body:
        whole = thinking.post("/v1/responses", input=f"SAY[{says}]").json()
        assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("stream", [False, True])
def test_a_plain_answer(thinking: RunningServer, stream: bool) -> None:
    message, reasons = ask(thinking, "just <b>text", stream, tools=[TOOL])
    assert (message["content"], message["tool_calls"]) == ("just <b>text", [])
    assert not message.get("reasoning")
    assert reasons == ["stop"]
    message, _ = ask(thinking, CALL, stream, tools=[TOOL], tool_choice="none")
    assert (message["content"], message["tool_calls"]) == (CALL, [])
    assert "tools" not in thinking.rendered[1]


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls(thinking: RunningServer, stream: bool) -> None:
    says = '[{"name": "weather", "parameters": {"city": "Bern"}}]'
    more = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message, reasons = ask(thinking, says, stream, **more)
    assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Bern"}'}]
    assert (message["content"], reasons) == (None, ["tool_calls"])
    wanted = thinking.params.structured_output
    assert wanted is not None
    schema = json.loads(wanted.value)
    assert schema["maxItems"] == 1
    jsonschema.validate([{"name": "weather", "parameters": {"city": "Bern"}}], schema)
    for wrong in ({"city": 1}, {"town": "Bern"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "weather", "parameters": wrong}], schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call(thinking: RunningServer, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    message, reasons = ask(thinking, '{"city": "Bern"}', stream, tools=[TOOL], tool_choice=choice)
    assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Bern"}'}]
    assert reasons == ["stop"]


def test_history_reaches_the_template(thinking: RunningServer) -> None:
    body: dict[str, Any] = {"messages": HISTORY, "tools": [TOOL], "max_tokens": 1}
    assert thinking.post("/v1/chat/completions", **body).status_code == 200
    seen, kwargs = thinking.rendered
    assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}
    assert seen[1]["reasoning"] == seen[1]["reasoning_content"] == "hm"
    assert seen[2]["tool_call_id"] == "call_1"
    assert kwargs["tools"][0]["function"]["name"] == "weather"


def test_a_budget_and_a_template_without_reasoning(thinking: RunningServer) -> None:
    assert thinking.chat("a", max_tokens=1, thinking_token_budget=9).status_code == 200
    params = thinking.params
    assert (params.thinking_end, params.thinking_token_budget) == (END, 9)
    off = {"chat_template_kwargs": {"close": True}, "thinking_token_budget": 9}
    answer = thinking.chat("SAY[<think> is a word]", **off).json()
    assert answer["choices"][0]["message"]["content"] == "<think> is a word"
    params = thinking.params
    assert (params.thinking_end, params.thinking_token_budget) == (None, None)


def test_reasoning_effort_goes_to_templates_that_know_it(start_server: StartServer) -> None:
    tokenizer = FakeTokenizer()
    server = start_server(FakeEngine(tokenizer=tokenizer))
    for reasons, effort, expected in (
        (Reasons(SCALE), "max", {"reasoning_effort": "max"}),
        (Reasons(("low", "high")), "none", {"reasoning_effort": "low"}),
        (Reasons(switch="enable_thinking"), "none", {"enable_thinking": False}),
        (Reasons(switch="thinking"), "high", {"thinking": True}),
    ):
        tokenizer.wanted = Forms(reasons=reasons)
        assert server.chat("a", max_tokens=1, reasoning_effort=effort).status_code == 200
        assert tokenizer.seen[1] == expected
        body = {"input": "a", "max_output_tokens": 16, "reasoning": {"effort": effort}}
        assert server.post("/v1/responses", **body).json()["reasoning"]["effort"] == effort
        assert tokenizer.seen[1] == expected


def test_a_template_that_is_not_trusted_is_not_tried(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a program: what it wants of conversations, tools and efforts is found by running it."""
    tokenizer, tried = FakeTokenizer(), list[str | None]()

    def forms(template: str | None = None) -> Forms:
        tried.append(template)
        return Forms()

    monkeypatch.setattr(tokenizer, "forms", forms)
    server = start_server(FakeEngine(tokenizer=tokenizer))
    more = {"tools": [TOOL], "reasoning_effort": "high", "chat_template": "{{ x }}"}
    assert server.chat("a", **more).status_code == 400
    assert server.post("/v1/responses", input="a", chat_template="{{ x }}").status_code == 400
    assert server.post("/v1/messages", messages=[HISTORY[0]], chat_template="{{ x }}").is_error
    assert set(tried) == {None}


def test_templates_of_requests_want_a_flag(start_server: StartServer, tmp_path: Path) -> None:
    tokenizer = FakeTokenizer()
    (tmp_path / "chat.jinja").write_text("the file's")
    options: Any = {"chat_template": str(tmp_path / "chat.jinja")}
    options["trust_request_chat_template"] = True
    server = start_server(FakeEngine(tokenizer=tokenizer), **options)
    server.chat("a", max_tokens=1)
    assert tokenizer.template_seen == "the file's"
    server.chat("a", max_tokens=1, chat_template="the client's")
    assert tokenizer.template_seen == "the client's"


def test_marks_that_are_special_tokens_are_kept(start_server: StartServer) -> None:
    server = start_server(FakeEngine(), tool_call_parser="mistral", enable_auto_tool_choice=True)
    says = '[TOOL_CALLS][{"name": "weather", "arguments": {}}]'
    message, _ = ask(server, says, False, tools=[TOOL])
    assert message["tool_calls"] == [{"name": "weather", "arguments": "{}"}]
    assert not server.params.skip_special_tokens
    server.chat("a", max_tokens=1)
    assert server.params.skip_special_tokens


def test_logprobs_ride_along(thinking: RunningServer) -> None:
    parts = payloads(thinking.chat("SAY[<think>ab</think>cd]", stream=True, logprobs=True))
    scores = [part["choices"][0]["logprobs"] for part in parts]
    seen = [item["token"] for each in scores if each is not None for item in each["content"]]
    assert "".join(seen) == "<think>ab</think>cd"


def test_a_tokenizer_without_the_mark(start_server: StartServer) -> None:
    class Plain(FakeTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(map(ord, text))

    with pytest.raises(ConfigError, match="--reasoning-parser"):
        start_server(FakeEngine(tokenizer=Plain()), reasoning_parser="qwen3")


def test_structured_output_of_requests(server: RunningServer) -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    cases: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
        ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
        ({"response_format": named}, ("json", '{"type": "object"}', "response_format")),
        # A schema beside its type; llama.cpp's clients send the first.
        *(
            ({"response_format": form}, ("json", '{"type": "object"}', "response_format"))
            for form in (
                {"type": "json_object", "schema": schema},
                {"type": "json_schema", "schema": schema, "name": "a"},
            )
        ),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs")),
        ({"guided_choice": ["a", "b"]}, ("choice", '["a", "b"]', "guided_choice")),
        ({"guided_json": '{"type":"object"}'}, ("json", '{"type": "object"}', "guided_json")),
    ]
    for fields, expected in cases:
        for response in (
            server.chat("a", max_tokens=1, **fields),
            server.complete("a", max_tokens=1, **fields),
        ):
            assert response.status_code == 200, response.text
            found = server.params.structured_output
            assert found is not None
            assert (found.kind, found.value, found.field) == expected
