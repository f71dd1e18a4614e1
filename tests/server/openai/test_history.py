"""Histories as agents send them again with every turn: nothing of them ends a conversation."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvserve.engine.frontend.content import UNSEEN
from tests.server.conftest import RunningServer, StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.openai import templates
from tests.server.openai.test_templates import (
    TOOL,
    TemplateTokenizer,
    call,
    prompt,
    result,
    tokenizer_of,
)

ROLES = {"S": "system", "D": "developer", "U": "user", "A": "assistant"}
DOORS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
ALL = [
    *("STRICT", "GEMMA", "NO_SYSTEM", "LLAMA31", "COLLECTS", "CHATML", "ALTERNATES", "IN_PLACE"),
    "REPLACES",
    "NO_TOOLS",
    "ANY_ROLE",
    *("QWEN", "LLAMA", "DEEPSEEK", "MISTRAL", "HARMONY", "PLAIN", "PARTS", "CHOOSY", "NEMO"),
]
ORDERS = [
    *("UDU", "US", "SU", "SUS", "SSU", "SUDSU", "SUASU", "UASU", "SUADU", "USUAUS", "SUAUAS"),
    *("SUASDU", "SUAUSAU", "UUAAU", "S", "SS", "DUSAUSAU", "AU", "SAU"),
]


def turns(order: str) -> list[Any]:
    return [{"role": ROLES[c], "content": f"words{i}."} for i, c in enumerate(order)]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("order", ORDERS)
def test_every_turn_shows_wherever_it_stands(name: str, order: str) -> None:
    """Kind: what a template does with a turn where it does not expect it: refused, lost, or under a
    role that its model does not know."""
    text = prompt(name, *turns(order))
    assert all(text.count(f"words{at}.") == 1 for at in range(len(order))), text
    assert "<start_of_turn>system" not in text
    # Turns of user and assistant stay in their order.
    said = [text.index(f"words{at}.") for at, role in enumerate(order) if role in "UA"]
    assert said == sorted(said)


IN = {
    "LLAMA31": "<|start_header_id|>system<|end_header_id|>\n\nwords{}.",
    "CHATML": "<|im_start|>system\nwords{}.",
    "QWEN": "<|im_start|>system\nwords{}.",
    "IN_PLACE": "[SYSTEM_PROMPT]words{}.",
}


@pytest.mark.parametrize("name", IN)
def test_a_system_turn_stays_where_it_shows(name: str) -> None:
    text = prompt(name, *turns("SUASUDU"))
    assert text.index("words2.") < text.index(IN[name].format(3)) < text.index("words4.")
    assert text.index("words4.") < text.index(IN[name].format(5)) < text.index("words6.")


def test_where_a_system_turn_goes_that_does_not_show() -> None:
    """Before the first answer to the first system turn, later to the user's turn beside it: what
    was computed of the conversation before it is found again."""
    text = prompt("STRICT", *turns("SUS"))
    assert "<|im_start|>system\nwords0.\n\nwords2.<|im_end|>\n<|im_start|>user\nwords1." in text
    assert "<|im_start|>system\nwords1.<|im_end|>" in prompt("STRICT", *turns("UDU"))
    assert "<|im_start|>user\nwords3.\n\nwords4." in prompt("STRICT", *turns("SUASU"))
    assert "<|im_start|>user\nwords3.\n\nwords4." in prompt("STRICT", *turns("SUAUS"))
    assert "<|im_start|>user\nwords1. // words0.\n" not in prompt("GEMMA", *turns("UDU"))
    assert "<start_of_turn>user\nwords1. // words0.\n\nwords2." in prompt("GEMMA", *turns("UDU"))
    assert "<start_of_turn>user\nwords0.\n\nwords1." in prompt("NO_SYSTEM", *turns("SU"))


@pytest.mark.parametrize("name", ALL)
def test_a_conversation_that_goes_on_begins_as_before(name: str) -> None:
    """Kind: a turn that moves makes all that was computed useless."""
    if name in ("COLLECTS", "ALTERNATES", "MISTRAL", "PARTS"):
        return  # the template itself writes what comes later before the rest, or at its end
    order = "SUSAUSAU"
    for end in (3, 6):
        start = prompt(name, *turns(order[:end]), add_generation_prompt=False)
        assert prompt(name, *turns(order)).startswith(re.sub(r"<(assistant|reply)>$", "", start)), (
            end
        )


@pytest.mark.parametrize("name", ["STRICT", "QWEN", "LLAMA31", "DEEPSEEK", "MISTRAL", "ALTERNATES"])
@pytest.mark.parametrize("tail", ["", "S", "U", "SU", "US", "AU", "ASU"])
def test_turns_behind_the_results_of_calls_show(name: str, tail: str) -> None:
    more = [{**turn, "content": f"late {turn['content']}"} for turn in turns(tail)]
    calls = {"role": "assistant", "content": "", "tool_calls": [call()]}
    text = prompt(name, *turns("SU"), calls, result(), *more, tools=[TOOL])
    for words in ("words0.", "words1.", "Zürich", "rain", *(turn["content"] for turn in more)):
        assert words in text, words


CALLED = ("QWEN", "STRICT", "LLAMA", "LLAMA31", "DEEPSEEK", "MISTRAL", "HARMONY", "CHOOSY", "NEMO")


def called(*calls: Any, content: Any = "") -> Any:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


HISTORIES: dict[str, tuple[list[Any], list[str]]] = {
    "types": (
        [called(call(arguments='{"i": 3, "b": true, "z": null, "l": ["two"]}')), result()],
        ["two", "rain"],
    ),
    "a call that was cut": ([called(call(arguments='{"city": "Zü')), result()], ["Zü", "rain"]),
    "arguments in a list": ([called(call(arguments='["Zug"]')), result()], ["Zug", "rain"]),
    "arguments that are a text": ([called(call(arguments='"Zug"')), result()], ["Zug", "rain"]),
    "a short id": ([called(call(call_id="a1")), result("rain", "a1")], ["Zürich", "rain"]),
    "an id twice": (
        [
            *(called(call(call_id="a")), result("rain", "a")),
            *(called(call(arguments='{"city": "Zug"}', call_id="a")), result("sun", "a")),
        ],
        ["Zürich", "rain", "Zug", "sun"],
    ),
    "a tool that is gone": ([called(call("mcp__a__b")), result()], ["mcp__a__b", "rain"]),
    "an empty result": ([called(call()), result(None)], ["Zürich"]),
    "no arguments": ([called({"id": "a", "function": {"name": "weather"}}), result()], ["rain"]),
    "a result without its call": ([result(), *turns("A")], ["rain", "words0."]),
    "a result behind a user's turn": (
        [called(call()), *turns("U"), result("sun", "b")],
        ["Zürich", "words0.", "sun"],
    ),
    "results of which a system turn comes first": (
        [called(call()), *turns("S"), result()],
        ["words0.", "rain"],
    ),
    "an empty answer": ([{"role": "assistant", "content": None}, *turns("U")], ["words0."]),
    "thoughts alone": (
        [{"role": "assistant", "content": "", "reasoning": "hm"}, *turns("U")],
        ["words0."],
    ),
    "an answer behind a call that said something": (
        [called(call(), content="I look."), result(), *turns("AU")],
        ["Zürich", "rain", "words0.", "words1."],
    ),
    "a call without a result": (
        [called(call(call_id="a"), call(arguments='{"n": "4"}', call_id="b")), result("sun", "b")],
        ["Zürich", "4", "sun"],
    ),
    "arguments that never end": ([called(call(arguments="[" * 5000)), result()], ["rain"]),
    "all at once": (
        [
            {"role": "user", "content": [{"type": "text", "text": text} for text in "tx"]},
            called(call(call_id="a"), call(arguments='{"n": "4"}', call_id="b")),
            *(result("rain", "b"), result("sun", "a"), *turns("U")),
        ],
        ["t\nx", "Zürich", "4", "rain", "sun", "words0."],
    ),
}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("kind", HISTORIES)
def test_histories_with_calls_show(name: str, kind: str) -> None:
    """Kind: what an agent sends again, whatever went wrong with it."""
    messages, words = HISTORIES[kind]
    for history in ([*turns("SU"), *messages], [*turns("U"), *messages]):
        text = prompt(name, *history, tools=[TOOL])
        assert all(each in text for each in words), text


def test_a_template_gets_calls_as_it_writes_them() -> None:
    calls = called(call(), call(arguments='{"n": 4, "s": "x"}', call_id="b"))
    text = prompt("CHOOSY", *turns("SU"), calls, result("sun", "b"), result(), tools=[TOOL])
    assert 'begin|>functions.weather:1<|tool_call_argument_begin|>{"n": "4", "s": "x"}' in text
    assert text.index("## functions.weather:1: sun") < text.index("## functions.weather:0: rain")
    assert text.startswith('// dweather{"city": {"type": "string"}}<user>words0.words1.')
    assert prompt("CHOOSY", *turns("U")).startswith("<user>")
    cut = prompt("QWEN", *turns("U"), called(call(arguments='{"city": "Z')), result())
    assert '"arguments": {"arguments": "{\\"city\\": \\"Z"}}' in cut
    alone = prompt("QWEN", *turns("U"), result(), *turns("A"))
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in alone


@pytest.mark.parametrize("name", [*CALLED, "GEMMA", "CHATML"])
def test_tools_show_whatever_they_lack(name: str) -> None:
    """Kind: a server of MCP that describes nothing, and templates that take no tools or some."""
    shapes: list[dict[str, Any]] = [
        *({}, {"description": None}, {"parameters": None}, {"parameters": {}}),
        *({"description": "d"}, {"parameters": {"type": "object"}}, {"strict": True}),
    ]
    for shape in shapes:
        tool = {"type": "function", "function": {"name": "look_here", **shape}}
        text = prompt(name, *turns("SU"), tools=[TOOL, tool])
        shown = tokenizer_of(name).forms().shows_tools
        assert "words1." in text and ("look_here" in text) == shown
        assert prompt(name, *turns("SU"), tools=[TOOL, tool["function"]]) == text


# ---- over HTTP ----------------------------------------------------------------------------------


def asked(server: RunningServer, door: str, messages: list[Any], **more: Any) -> Any:
    field = "input" if door.endswith("responses") else "messages"
    return server.post(door, **{field: messages, "max_tokens": 16, **more})


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("order", ["US", "USU", "USUAUS", "UASU", "UASUAS"])
def test_a_strict_template_refuses_no_agent(
    start_server: StartServer, door: str, order: str
) -> None:
    """Claude Code's first turn is [user, system]: six requests, six errors."""
    server = start_server(FakeEngine(2000, tokenizer=TemplateTokenizer(templates.STRICT)))
    more = {"system": "be"} if door.endswith("messages") else {}
    assert asked(server, door, turns(order), **more).status_code == 200
    assert all(f"words{at}." in server.prompts[-1] for at in range(len(order)))


def of(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


TEXT = {"type": "text", "text": "t"}
IMAGES: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A"}},
    {"type": "input_image", "image_url": "data:,"},
    {"type": "input_audio", "input_audio": {}},
    {"type": "file", "file": {"file_id": "f"}},
    {"type": "document", "source": {"type": "base64", "data": "A"}},
    {"type": "video_url", "video_url": {}},
    {"type": "from_the_future", "x": 1},
]
CONTENT: Any = {"type": "content", "content": [{"type": "text", "text": "a page"}]}
TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "input_text", "text": "a"}, "a"),
    ({"type": "output_text", "text": "a"}, "a"),
    ({"type": "tool_reference", "tool_name": "WebFetch"}, "The tool WebFetch is loaded."),
    ({"type": "document", "source": {"type": "text", "data": "a file"}}, "a file"),
    ({"type": "document", "source": CONTENT}, "a page"),
    ({"type": "document", "source": {"type": "content", "content": "a page"}}, "a page"),
    ({"type": "search_result", "source": "u", "title": "t", "content": [TEXT]}, "t"),
    ({"type": "resource", "resource": {"uri": "u", "text": "notes"}}, "notes"),
    ({"type": "from_the_future", "text": "yes"}, "yes"),
]


def tool_turn(door: str, *parts: Any) -> list[Any]:
    """A conversation whose tool has shown these parts."""
    if door.endswith("responses"):
        called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        shown = {"type": "function_call_output", "call_id": "c", "output": list(parts)}
        return [{"role": "user", "content": "u"}, called, shown]
    if door.endswith("messages"):
        used = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        shown = {"type": "tool_result", "tool_use_id": "c", "content": list(parts)}
        return [{"role": "user", "content": "u"}, of("assistant", used), of("user", shown)]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn: Any = {"role": "assistant", "tool_calls": calls}
    return [{"role": "user", "content": "u"}, turn, {**of("tool", *parts), "tool_call_id": "c"}]


@pytest.mark.parametrize("door", DOORS)
def test_what_tools_have_shown_is_text_or_a_note(server: RunningServer, door: str) -> None:
    """Kind: an allow-list of blocks that ends the conversation, one for each of three APIs."""
    for part, text in TEXTS:
        answer = asked(server, door, tool_turn(door, TEXT, part))
        assert answer.status_code == 200, answer.text
        assert "X-Kvserve-Skipped" not in answer.headers
        assert server.rendered[0][2]["content"] == f"t\n{text}"
    field = "input" if door.endswith("responses") else "messages"
    for part in IMAGES:
        answer = asked(server, door, tool_turn(door, TEXT, part))
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Kvserve-Skipped"] == f"{field}[2] ({part['type']})"
        assert server.rendered[0][2]["content"] == f"t\n{UNSEEN}"


@pytest.mark.parametrize("door", DOORS)
def test_a_users_image_is_refused_at_once_and_a_note_later(
    server: RunningServer, door: str
) -> None:
    for part in IMAGES:
        assert asked(server, door, [of("user", TEXT, part)]).status_code == 400
        later = [of("user", TEXT, part), *turns("AU")]
        answer = asked(server, door, later)
        assert answer.status_code == 200 and part["type"] in answer.headers["X-Kvserve-Skipped"]
        assert server.rendered[0][0]["content"] == f"t\n{UNSEEN}"
    for part, text in TEXTS:
        assert asked(server, door, [of("user", TEXT, part)]).status_code == 200
        assert server.rendered[0][0]["content"] == f"t\n{text}"


THOUGHTS: list[Any] = [
    {"type": "thinking", "thinking": "hm", "signature": "x"},
    {"type": "reasoning", "text": "hm", "summary": [{"type": "summary_text", "text": "no"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "no"}]},
    {"type": "redacted_thinking", "data": "x"},
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("part", THOUGHTS)
def test_thoughts_are_reasoning(server: RunningServer, door: str, part: Any) -> None:
    answer = asked(server, door, [*turns("U"), of("assistant", part, TEXT), *turns("U")])
    assert answer.status_code == 200, answer.text
    message = server.rendered[0][1]
    assert (message["content"], message.get("reasoning", "")) == (
        "t",
        "hm" if "hm" in str(part) else "",
    )


LEFT: list[Any] = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "x", "url": "u"}]},
    {"type": "mcp_tool_use", "id": "s", "name": "a", "server_name": "b", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "s", "content": [TEXT]},
    {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}},
    {"type": "container_upload", "file_id": "f"},
]


def test_what_a_servers_own_tools_have_left_is_left_out(server: RunningServer) -> None:
    """Kind: a conversation that another server has begun."""
    for part in LEFT[:-1]:
        for door in (DOORS[0], DOORS[2]):
            answer = asked(server, door, [*turns("U"), of("assistant", part, TEXT), *turns("U")])
            assert answer.status_code == 200, answer.text
            assert answer.headers["X-Kvserve-Skipped"] == f"messages[1] ({part['type']})"
            assert server.rendered[0][1]["content"] == "t"
    for kind in ("context_compaction", "compaction_trigger", "ghost_snapshot", "mcp_call", "new"):
        left = {"type": kind, "x": 1}
        answer = asked(server, "/v1/responses", [*turns("UA"), left, *turns("U")])
        assert answer.headers["X-Kvserve-Skipped"] == f"input[2] ({kind})"
    agent = {
        "type": "agent_message",
        "author": "a",
        "content": [{"type": "input_text", "text": "b"}],
    }
    assert asked(server, "/v1/responses", [*turns("U"), agent]).status_code == 200
    assert server.rendered[0][1] == {"role": "user", "content": "b"}
    compacted = {"type": "compaction", "content": "what was said"}
    assert (
        asked(server, "/v1/messages", [of("assistant", compacted), *turns("U")]).status_code == 200
    )
    assert server.rendered[0][0]["content"] == "what was said"


def test_a_freeform_call_of_another_server_is_a_call(server: RunningServer) -> None:
    calls = [{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}]
    history = [*turns("U"), {"role": "assistant", "tool_calls": calls}]
    history.append({"role": "tool", "tool_call_id": "c", "content": "x"})
    answer = asked(server, DOORS[0], history)
    assert answer.status_code == 200, answer.text
    null = {"id": "c", "type": None, "function": {"name": "f", "arguments": None}}
    [made] = server.rendered[0][1]["tool_calls"]
    messages = [history[0], {"role": "assistant", "tool_calls": [null]}, history[2]]
    assert asked(server, DOORS[0], messages).status_code == 200
    assert made["function"] == {"name": "run", "arguments": {"input": "ls"}}
    assert made["type"] == "function" and "custom" not in made


def test_tools_that_a_server_would_run_are_skipped_on_chat_too(server: RunningServer) -> None:
    tools = [TOOL, {"type": "web_search_preview"}, {"type": "custom", "custom": {"name": "a"}}]
    for stream in (False, True):
        answer = server.chat("SAY[x]", tools=tools, stream=stream)
        assert answer.status_code == 200, answer.text
        said = "tools[1] (web_search_preview), tools[2] (custom)"
        assert answer.headers["X-Kvserve-Skipped"] == said
        [given] = server.rendered[1]["tools"]
        assert given["function"]["name"] == "weather"
    answer = server.chat("SAY[x]", tools=tools[1:])
    assert answer.status_code == 200 and "tools" not in server.rendered[1]
    assert server.post("/tokenize", messages=[{"role": "user", "content": "a"}], tools=tools).json()


@pytest.mark.parametrize("door", DOORS)
def test_tools_that_no_template_writes_are_named(start_server: StartServer, door: str) -> None:
    """Kind: a model that sees no tools answers in prose, and nobody knows why."""
    server = start_server(FakeEngine(2000, tokenizer=TemplateTokenizer(templates.PLAIN)))
    tool = {"name": "f", "input_schema": {"type": "object"}}
    if door.endswith("responses"):
        tool = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    tool = TOOL if door.endswith("completions") else tool
    answer = asked(server, door, turns("U"), tools=[tool])
    assert (answer.status_code, answer.headers["X-Kvserve-Skipped"]) == (200, "tools")
