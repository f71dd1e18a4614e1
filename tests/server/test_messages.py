"""``/v1/messages``: Anthropic's API as its clients and Claude Code send it. The client itself is in
``tests/acceptance``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvserve.engine.frontend.chat_template import Forms
from kvserve.engine.frontend.content import UNSEEN
from kvserve.engine.frontend.efforts import Reasons
from tests.server.conftest import MODEL, RunningServer, StartServer
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.openai import templates
from tests.server.openai.test_templates import TemplateTokenizer

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"name": "weather", "description": "d", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
SAYS = f"<think>hm</think>Look: {CALL}"
CACHED = {"cache_control": {"type": "ephemeral"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
            {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [IMAGE], **CACHED},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "content": [{"type": "text", "text": "no city"}],
                "is_error": True,
            },
            {"type": "document", "source": {"type": "text", "data": "a file"}},
            {"type": "text", "text": "<system-reminder>c</system-reminder>", **CACHED},
        ],
    },
]
SECOND_TURN: dict[str, Any] = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cch=0;"},
        {"type": "text", "text": "be brief", **CACHED},
    ],
    "messages": HISTORY,
    "tools": [{**TOOL, **CACHED, "eager_input_streaming": True}],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "max_tokens": 2,
}
"""As Claude Code sends it. The first part of its system prompt differs in each request."""


@pytest.fixture
def server(thinking: RunningServer) -> RunningServer:
    return thinking


def ask(server: RunningServer, content: Any, **body: Any) -> Any:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    given = {"model": MODEL, "max_tokens": 500, "messages": messages, **body}
    return server.http.post("/v1/messages", json=given)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named twice."""
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def built(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of a stream."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(blocks) - 1
            kind, [(name, text)] = event["delta"].pop("type"), event["delta"].items()
            assert kind.removesuffix("_delta") in ("text", "thinking", "input_json")
            name = "json" if name == "partial_json" else name
            blocks[-1][name] += text
        elif event["type"] == "content_block_stop":
            is_open = False
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    assert not is_open
    return blocks


def test_blocks_whole_and_streamed(server: RunningServer) -> None:
    whole = ask(server, f"SAY[{SAYS}]", tools=[TOOL]).json()
    assert whole["type"] == "message" and whole["role"] == "assistant"
    thought, text, call = whole["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "Look: "}
    assert (call["name"], call["input"]) == ("weather", {"city": "Bern"})
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    events = events_of(ask(server, f"SAY[{SAYS}]", tools=[TOOL], stream=True).text)
    first, *_, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        *("message_start", "message_delta", "message_stop"),
    )
    assert first["message"]["content"] == [] and first["message"]["stop_reason"] is None
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == whole["usage"] and whole["usage"]["output_tokens"] > 50
    blocks = built(events)
    assert [{**b, "id": 0} for b in blocks] == [{**b, "id": 0} for b in whole["content"]]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ud83d"}),
        ('{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"a": "b\nc"}', {"a": "b\nc"}),
        ('{"a": NaN}', {"a": None}),
        ('{"a": 1e999}', {"a": None}),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", {"a": json.loads("[" * 300 + "]" * 300)}),
    ],
)
def test_arguments_that_an_answer_can_hardly_hold(
    server: RunningServer, arguments: str, read: Any
) -> None:
    """Kind: a whole answer has a call's arguments as values, which need not be text of JSON."""
    says = f'SAY[<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>]'
    answer = ask(server, says, tools=[TOOL], max_tokens=900)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["content"]
    assert call["input"] == read


@pytest.mark.parametrize(
    ("most", "reason"),
    [
        (3, "max_tokens"),
        # Agents ask for what their own models give; the context has 2,000.
        (32_000, "model_context_window_exceeded"),
    ],
)
def test_why_it_stopped(server: RunningServer, most: int, reason: str) -> None:
    body: Any = {"thinking": {"type": "disabled"}, "stop_sequences": ["!"], "max_tokens": most}
    assert ask(server, "hi", **body).json()["stop_reason"] == reason
    assert server.params.stop_strings == ("!",)
    assert ask(server, "SAY[x]").json()["stop_reason"] == "end_turn"


def test_a_conversation_as_claude_code_sends_it(server: RunningServer) -> None:
    """Kind: a history that is refused: it reads images, and sends them with every turn."""
    for header in ("cch=0", "cch=1"):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: {header};"}]
        body = {**SECOND_TURN, "system": system + SECOND_TURN["system"][1:]}
        answer = server.http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Kvserve-Skipped"] == "messages[2] (image), output_config"
    *_, first, second = server.prompts
    assert first == second
    for part in ("<system>be brief<user>a\nb", "I look.", "Bern", UNSEEN, "Error: no city"):
        assert part in first
    assert "a file\n<system-reminder>" in first and "billing" not in first


@pytest.mark.parametrize(
    ("begun", "says", "thought", "text"),
    [
        ("The sum is", " 4", None, " 4"),
        ("<think>hm</think>It is", " 4", None, " 4"),
        ("<think>hm", "m</think>4", "m", "4"),
    ],
)
def test_what_is_continued_says_whether_it_is_reasoning(
    start_server: StartServer, begun: str, says: str, thought: str | None, text: str
) -> None:
    """Kind: two features that each know the prompt's end. R1 reasons from the first token on, but
    not in the middle of an answer."""
    for parser in ("deepseek_r1", "qwen3"):
        engine = FakeEngine(2000)
        server = start_server(engine, reasoning_parser=parser)
        history = [
            {"role": "user", "content": f"SAY[{says}]"},
            {"role": "assistant", "content": begun},
        ]
        found = {b["type"]: b for b in ask(server, history).json()["content"]}
        assert server.prompts[-1].endswith(f"<assistant>{begun}")
        assert found["text"]["text"] == text
        assert ("thinking" in found) == (thought is not None)


def test_what_is_not_done_here_is_skipped_and_said(server: RunningServer) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, TOOL]
    for stream in (False, True):
        answer = ask(server, "SAY[x]", tools=tools, mcp_servers=[{"name": "a"}], stream=stream)
        assert answer.status_code == 200
        said = "tools[0] (web_search_20250305), mcp_servers"
        assert answer.headers["X-Kvserve-Skipped"] == said
    assert "X-Kvserve-Skipped" not in ask(server, "SAY[x]", tools=[TOOL]).headers


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "B"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city": "B"}'),
    ],
)
def test_a_call_may_be_forced(server: RunningServer, choice: Any, says: str) -> None:
    answer = ask(server, f"SAY[{says}]", tools=[TOOL], tool_choice=choice).json()
    [call] = answer["content"]
    assert (call["type"], call["input"]) == ("tool_use", {"city": "B"})
    assert answer["stop_reason"] == "tool_use"
    form = server.params.structured_output
    assert form is not None and form.kind == "json"


def test_the_answers_form_and_fields_of_ours(server: RunningServer) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert ask(server, "SAY[x]", output_config=form, kv_policy="kara", seed=3).status_code == 200
    params = server.params
    assert params.structured_output is not None and params.structured_output.kind == "json"
    assert params.seed == 3
    assert params.kv_policy == "kara"


def test_a_failure_in_a_stream_has_its_form(start_server: StartServer) -> None:
    last = events_of(ask(start_server(), "DIE", stream=True).text)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "headers"),
    [
        ("GET", "/v1/messages", 405, {}),
        ("POST", "/v1/messages/nothing", 404, {}),
        ("POST", "/v1/messages", 403, {"Origin": "http://elsewhere.example"}),
    ],
)
def test_a_refusal_before_the_route_has_its_form(
    server: RunningServer, method: str, path: str, status: int, headers: dict[str, str]
) -> None:
    plain = {**headers, "Content-Type": "text/plain"} if headers else {}
    answer = server.http.request(method, path, content=b"{}", headers=plain)
    assert answer.status_code == status
    assert answer.json()["type"] == "error" and answer.json()["error"]["message"]


def test_tokens_are_counted(server: RunningServer) -> None:
    body = {"model": MODEL, "system": "be", "messages": [{"role": "user", "content": "hi"}]}
    counted = server.http.post("/v1/messages/count_tokens", json=body).json()
    usage = ask(server, "hi", system="be").json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_fields_of_ours_are_read_in_large_bodies_too(server: RunningServer, path: str) -> None:
    """Of a body of more than 16 KiB only the fields that a route names were read."""
    field = "input" if path.endswith("responses") else "messages"
    body = {field: [{"role": "user", "content": "hi"}], "metadata": {"a": "a" * 20_000}}
    answer = server.http.post(path, json={**body, "kv_policy": "kara", "top_k": 7})
    assert answer.status_code == 200
    params = server.params
    assert (params.kv_policy, params.top_k) == ("kara", 7)


@pytest.mark.parametrize("kind", ["adaptive", "between_tools", "enabled", "disabled"])
@pytest.mark.parametrize("switch", ["", "enable_thinking", "thinking"])
def test_thinking_goes_to_templates_that_know_it(
    start_server: StartServer, kind: str, switch: str
) -> None:
    """Kind: a field that is parsed and dropped. One rule for all APIs: what no template knows
    is named, and no error, since agents ask for it in every request."""
    tokenizer = FakeTokenizer()
    tokenizer.wanted = Forms(reasons=Reasons(switch=switch))
    server = start_server(FakeEngine(2000, tokenizer=tokenizer))
    thinking = {"type": kind, **({"budget_tokens": 9} if kind == "enabled" else {})}
    answer = ask(server, "hi", thinking=thinking)
    given = {"enabled": True, "disabled": False}.get(kind)
    asked = {} if given is None else {switch: given}
    assert answer.status_code == 200
    assert tokenizer.seen[1] == (asked if switch else {})
    skipped = answer.headers.get("X-Kvserve-Skipped")
    assert skipped == ("thinking" if given is not None and not switch else None)
    body = {"messages": [{"role": "user", "content": "hi"}], "thinking": thinking}
    assert server.http.post("/v1/messages/count_tokens", json=body).status_code == 200


EFFORTS = ["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SCALES = {
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('unknown') }}{% endif %}E={{ reasoning_effort }}.": (
        *("low", "low", "low", "medium", "xhigh", "xhigh", "xhigh"),
    ),
    "{% if reasoning_effort == 'high' %}E=high.{% elif reasoning_effort == 'low' %}E=low."
    "{% elif reasoning_effort %}E=medium.{% endif %}": (
        *("low", "low", "low", "medium", "high", "high", "high"),
    ),
    "{% if reasoning_effort == 'max' %}E=max.{% elif reasoning_effort %}E=medium.{% endif %}": (
        *("medium", "medium", "medium", "medium", "medium", "max", "max"),
    ),
    "{% if reasoning_effort is defined and reasoning_effort == 'high' %}E=high.{% else %}E=Max."
    "{% endif %}": ("high", "high", "high", "high", "high", "Max", "Max"),
    "{% if reasoning_effort == 'none' %}E=none.{% elif reasoning_effort %}E=on.{% endif %}": (
        *("none", "none", "on", "on", "on", "on", "on"),
    ),
    "E={{ reasoning_effort }}.": EFFORTS,
    "{% if enable_thinking is defined and not enable_thinking %}E=off.{% else %}E=on.{% endif %}": (
        *("off", "on", "on", "on", "on", "on", "on"),
    ),
    "{% if thinking is defined and thinking %}E=on.{% else %}E=off.{% endif %}": (
        *("off", "on", "on", "on", "on", "on", "on"),
    ),
    "{% if enable_thinking is defined and not enable_thinking %}E=off.{% else %}"
    "E={{ reasoning_effort }}.{% endif %}": ("off", *EFFORTS[1:]),
    "": (None,) * 7,
}
"""What a template writes of an effort -> what each becomes."""


@pytest.mark.parametrize("writes", SCALES)
def test_an_effort_is_the_nearest_that_the_template_takes(
    start_server: StartServer, writes: str
) -> None:
    """Kind: a client's scale and the template's are two."""
    server = start_server(FakeEngine(2000, tokenizer=TemplateTokenizer(writes + templates.PLAIN)))
    for effort, becomes in zip(EFFORTS, SCALES[writes], strict=True):
        user = [{"role": "user", "content": "hi"}]
        for path, body, field in (
            ("/v1/chat/completions", {"reasoning_effort": effort}, "reasoning_effort"),
            ("/v1/messages", {"output_config": {"effort": effort}}, "output_config"),
            ("/v1/responses", {"reasoning": {"effort": effort}}, "reasoning"),
        ):
            name = "input" if path.endswith("responses") else "messages"
            answer = server.http.post(path, json={name: user, "max_tokens": 16, **body})
            assert answer.status_code == 200, answer.text
            wrote = server.prompts[-1].partition("<user>")[0]
            assert wrote == ("" if becomes is None else f"E={becomes}."), (path, effort)
            assert answer.headers.get("X-Kvserve-Skipped") == (None if becomes else field)


def test_what_a_client_sets_itself_is_not_set_again(start_server: StartServer) -> None:
    """Kind: two fields for one thing: the template's own argument counts."""
    tokenizer = FakeTokenizer()
    tokenizer.wanted = Forms(reasons=Reasons(switch="enable_thinking"))
    server = start_server(FakeEngine(2000, tokenizer=tokenizer))
    more = {"output_config": {"effort": "high"}, "thinking": {"type": "enabled"}}
    own = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(server, "hi", **more, **own).status_code == 200
    assert tokenizer.seen[1] == {"enable_thinking": False}
    answer = ask(server, "hi", output_config={"effort": "from the future"})
    assert answer.headers["X-Kvserve-Skipped"] == "output_config (effort from the future)"
