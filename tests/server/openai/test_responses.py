"""``/v1/responses`` with the official client: items, events, tools, history, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from kvserve.engine.frontend.content import UNSEEN
from tests.server.conftest import MODEL, RunningServer
from tests.server.fake_engine import FakeEngine

TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SAYS = (
    '<think>hm</think>Look: <tool_call>{"name": "weather", "arguments": {"city": "Bern"}}'
    "</tool_call>"
)
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "w?"}]},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"query": "x"}},
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "r", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Bern"}'},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "It rains."}],
    },
    {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": "Done!"},
    {"type": "function_call", "call_id": "e", "name": "view_image", "arguments": "null"},
    {
        "type": "function_call_output",
        "call_id": "e",
        "output": [
            {"type": "input_text", "text": "it is"},
            {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
        ],
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
    {"role": "user", "content": "why?"},
]
"""Of an agent, with what tools have shown, and what other servers have left."""


@pytest.fixture
def server(thinking: RunningServer) -> RunningServer:
    return thinking


def test_a_text(server: RunningServer) -> None:
    response = server.openai().responses.create(
        model=MODEL, input="hi", instructions="be brief", max_output_tokens=3
    )
    assert response.output_text == "0 1 2 "
    assert (response.status, response.object) == ("incomplete", "response")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 3
    assert server.prompts[-1] == "<system>be brief<user>hi<assistant>"
    assert server.openai().responses.create(model=MODEL, input="SAY[x]").status == "completed"


def test_items_and_their_events(server: RunningServer) -> None:
    whole = server.openai().responses.create(model=MODEL, input=f"SAY[{SAYS}]", tools=[TOOL])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output_text == "Look: "
    call: Any = whole.output[2]
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    with server.openai().responses.stream(
        model=MODEL, input=f"SAY[{SAYS}]", tools=[TOOL]
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )
    assert final.output_text == "Look: "
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "Look: "
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (
        kinds.count("response.output_item.added") == 3 == kinds.count("response.output_item.done")
    )


def test_a_history(server: RunningServer) -> None:
    """Kind: a history that is refused ends the conversation: the agent sends it with every turn."""
    body = {"input": HISTORY, "tools": [TOOL], "max_output_tokens": 1}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    said = "input[1] (web_search_call), input[9] (input_image)"
    assert answer.headers["X-Kvserve-Skipped"] == said
    messages, kwargs = server.rendered
    assert kwargs["tools"][0]["function"]["name"] == "weather"
    calls, contents = [], []
    for message in messages:
        calls += [call["function"] for call in message.get("tool_calls", ())]
        contents.append((message["role"], message["content"]))
    assert calls == [
        {"name": "weather", "arguments": {"city": "Bern"}},
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "view_image", "arguments": {}},
    ]
    image = f"it is\n{UNSEEN}"
    assert contents == [
        *(("user", "w?"), ("assistant", ""), ("tool", "rain"), ("assistant", "It rains.")),
        *(("tool", "Done!"), ("assistant", ""), ("tool", image)),
        *(("assistant", "I will not."), ("user", "why?")),
    ]
    assert messages[1]["reasoning"] == "hm"


def test_tokens_are_counted_and_metadata_come_back(server: RunningServer) -> None:
    body = {"input": HISTORY, "tools": [TOOL], "instructions": "be", "metadata": {"a": "b"}}
    counted = server.http.post("/v1/responses/input_tokens", json=body).json()
    few = {"max_output_tokens": 1, "top_logprobs": 0}  # none, which is OpenAI's default
    answer = server.http.post("/v1/responses", json={**body, **few}).json()
    count = answer["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": count}
    assert answer["metadata"] == {"a": "b"}
    refused = server.http.post("/v1/responses/input_tokens", json={**body, "model": "x"})
    assert refused.status_code == 404


def test_parse(server: RunningServer) -> None:
    class City(BaseModel):
        name: str

    response = server.openai().responses.parse(
        model=MODEL, input='SAY[{"name": "Bern"}]', text_format=City
    )
    assert response.output_parsed == City(name="Bern")
    wanted = server.params.structured_output
    assert wanted is not None and wanted.kind == "json" and '"name"' in wanted.value


def test_a_failure_in_the_stream(start_server: Any) -> None:
    server = start_server(FakeEngine())
    events = list(server.openai().responses.create(model=MODEL, input="DIE SLOW", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None


def test_codex_and_its_tools(server: RunningServer) -> None:
    """It could not start: tools that OpenAI defines were refused, and so was all of the request."""
    tools = [
        {**TOOL, "strict": False},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "local_shell"},
    ]
    body = {
        **{"model": MODEL, "instructions": "You are Codex.", "tools": tools, "store": False},
        **{"tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None},
        **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "a"},
        **{"truncation": "auto", "max_tool_calls": 4, "text": {"verbosity": "low"}},
        "input": [{"type": "message", "role": "user", "content": f"SAY[{SAYS}]"}],
    }
    for stream in (False, True):
        answer = server.http.post("/v1/responses", json={**body, "stream": stream})
        assert answer.status_code == 200
        said = "tools[1] (web_search), tools[3] (local_shell)"
        assert answer.headers["X-Kvserve-Skipped"] == said
        assert '"function_call"' in answer.text
        # They were repeated, in three events of a stream.
        for kind in ("web_search", "apply_patch", "local_shell"):
            assert kind not in answer.text
        assert '"tools":[{"type":"function","name":"weather"' in answer.text


def test_the_names_of_what_is_skipped_are_no_headers(server: RunningServer) -> None:
    tools = [{"type": "a\r\nX-Evil: 1\u00e9"}, {"type": "b" * 9000}]
    answer = server.http.post("/v1/responses", json={"input": "SAY[x]", "tools": tools})
    assert answer.status_code == 200 and "X-Evil" not in answer.headers
    said = answer.headers["X-Kvserve-Skipped"]
    assert said.startswith("tools[0] (a??X-Evil: 1?), tools[1] (bbb") and len(said) == 1000


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **more}


NOTES = {"type": "namespace", "name": "mcp__notes", "description": "n", "tools": [function("read")]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "d", "format": GRAMMAR}
SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {}}
NAMES = ("functions__exec", "tool_search")
OWN_TOOLS = [function("read"), NOTES, PATCH, {"type": "web_search"}]


def called(name: str, arguments: str) -> str:
    return f'SAY[<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>]'


CALLED: list[tuple[str, str, dict[str, Any]]] = [
    ("read", '{"a": 1}', {"type": "function_call", "name": "read", "arguments": '{"a": 1}'}),
    (
        "mcp__notes__read",
        '{"a": 1}',
        {
            **{"type": "function_call", "namespace": "mcp__notes", "name": "read"},
            "arguments": '{"a": 1}',
        },
    ),
    (
        "apply_patch",
        '{"input": "*** Begin\\n+\\"a\\""}',
        {"type": "custom_tool_call", "name": "apply_patch", "input": '*** Begin\n+"a"'},
    ),
    (
        "functions__exec",
        '{"input": "text(1)"}',
        {"type": "custom_tool_call", "namespace": "functions", "name": "exec", "input": "text(1)"},
    ),
    (
        "tool_search",
        '{"query": "notes"}',
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "notes"}},
    ),
]


@pytest.mark.parametrize(("name", "arguments", "item"), CALLED)
def test_the_clients_own_tools_are_called_by_their_names(
    server: RunningServer, name: str, arguments: str, item: dict[str, Any]
) -> None:
    """Kind: a container of the client's own functions is taken for a tool of OpenAI's: no MCP tool
    of Codex ever reached the model. It refuses a joined name."""
    run = {"type": "custom", "name": "exec"}
    exec_ = {"type": "namespace", "name": "functions", "tools": [run]}
    more = {"type": "additional_tools", "role": "developer", "tools": [exec_, SEARCH]}
    user = {"role": "user", "content": called(name, arguments)}
    body = {"input": [more, user], "tools": OWN_TOOLS}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.headers["X-Kvserve-Skipped"] == "tools[3] (web_search)"
    [found] = answer.json()["output"]
    call_id = found.pop("call_id")
    assert found.pop("id") and found.pop("status") == "completed"
    assert found == item
    given = {tool["function"]["name"]: tool["function"] for tool in server.rendered[1]["tools"]}
    assert given.keys() == {name, "read", "mcp__notes__read", "apply_patch", *NAMES}
    assert given["apply_patch"]["parameters"]["required"] == ["input"]
    assert "start: /a+/" in given["apply_patch"]["description"]
    # The client sends it back with the next turn.
    output = {"type": "function_call_output", "call_id": call_id, "output": "done"}
    if item["type"] == "custom_tool_call":
        output["type"] = "custom_tool_call_output"
    if item["type"] == "tool_search_call":
        output = {"type": "tool_search_output", "call_id": call_id, "tools": [function("found")]}
    history = [more, {**user, "content": "hi"}, {**found, "call_id": call_id}, output]
    answer = server.http.post("/v1/responses", json={**body, "input": history, "stream": True})
    assert answer.status_code == 200, answer.text
    messages, kwargs = server.rendered
    [call] = messages[1]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == (call_id, name)
    read = {"input": item["input"]} if "input" in item else {"a": 1}
    assert call["function"]["arguments"] == (read if name != "tool_search" else {"query": "notes"})
    if item["type"] == "tool_search_call":
        assert messages[2]["content"] == "Loaded: found"
        assert kwargs["tools"][-1]["function"]["name"] == "found"


def test_the_events_of_a_freeform_call(server: RunningServer) -> None:
    says = called("apply_patch", '{"input": "a\\nb"}')
    with server.openai().responses.stream(model=MODEL, input=says, tools=[PATCH]) as stream:  # type: ignore[list-item]
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    added, delta, done, ended = events[2:-1]
    assert added.item.input == "" and delta.delta == done.input == ended.item.input == "a\nb"  # type: ignore[union-attr]


def test_an_answer_that_was_cut_has_what_there_is_of_a_freeform_call(server: RunningServer) -> None:
    says = called("apply_patch", '{"input": "a lot of text"}')
    body = {"input": says, "tools": [PATCH], "max_output_tokens": 65}
    [item] = server.http.post("/v1/responses", json=body).json()["output"]
    assert item["input"] and "a lot of text".startswith(item["input"])


ONLY = '{"a": 1}'


@pytest.mark.parametrize(
    ("choice", "says", "names"),
    [
        ("required", '[{"name": "mcp__notes__read", "parameters": {"a": 1}}]', None),
        ({"type": "function", "name": "read", "namespace": "mcp__notes"}, ONLY, None),
        ({"type": "custom", "name": "apply_patch"}, '{"input": "x"}', None),
        ({"type": "function", "function": {"name": "read"}}, ONLY, None),
        ({"type": "allowed_tools", "mode": "auto", "tools": [function("read")]}, "hi", {"read"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [NOTES, {"type": "web_search"}]},
            '[{"name": "mcp__notes__read", "parameters": {"a": 1}}]',
            {"mcp__notes__read"},
        ),
    ],
)
def test_tool_choice_names_the_clients_tools(
    server: RunningServer, choice: Any, says: str, names: set[str] | None
) -> None:
    body = {"input": f"SAY[{says}]", "tools": OWN_TOOLS, "tool_choice": choice}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    kinds = {item["type"] for item in answer.json()["output"]}
    assert kinds <= {"function_call", "custom_tool_call"} or says == "hi"
    assert answer.json()["tool_choice"] == choice
    given = {tool["function"]["name"] for tool in server.rendered[1]["tools"]}
    assert given == (names or {"read", "mcp__notes__read", "apply_patch"})


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_on_chat(server: RunningServer, mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    for allowed in (
        {"allowed_tools": {"mode": mode, "tools": tools[1:]}},
        {"mode": mode, "tools": [{"type": "function", "name": "g"}]},
    ):
        choice = {"type": "allowed_tools", **allowed}
        assert server.chat("SAY[x]", tools=tools, tool_choice=choice).status_code == 200
        [given] = server.rendered[1]["tools"]
        assert given["function"]["name"] == "g"
    choice = {"type": "allowed_tools", "mode": mode, "tools": [function("h")]}
    answer = server.chat("SAY[x]", tools=tools, tool_choice=choice)
    assert answer.status_code == 400 and "no tool 'h'" in answer.json()["error"]["message"]


def test_names_of_tools_are_apart(server: RunningServer) -> None:
    """Kind: joined names that are another tool's, too long, or of letters that no name has."""
    odd = {"type": "namespace", "name": "a b/é" + "n" * 200, "tools": [function("f")]}
    same = {**NOTES, "tools": [function(chr(0x400 + at)) for at in range(1500)]}
    tools = [function("n__f"), {**NOTES, "name": "n", "tools": [function("f")]}, odd, same]
    answer = server.http.post("/v1/responses", json={"input": "SAY[x]", "tools": tools})
    assert answer.status_code == 200
    names = [tool["function"]["name"] for tool in server.rendered[1]["tools"]]
    assert names[:2] == ["n__f", "n__f_2"] and len(names[2]) == 128 and len(set(names)) == 1503
    for name, item in (("n__f_2", ("f", "n")), ("n__f", ("n__f", None))):
        body = {"input": called(name, "{}"), "tools": tools}
        [call] = server.http.post("/v1/responses", json=body).json()["output"]
        assert (call["name"], call.get("namespace")) == item
