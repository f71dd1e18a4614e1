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


def test_the_names_of_what_is_skipped_are_no_headers(server: RunningServer) -> None:
    tools = [{"type": "a\r\nX-Evil: 1\u00e9"}, {"type": "b" * 9000}]
    answer = server.http.post("/v1/responses", json={"input": "SAY[x]", "tools": tools})
    assert answer.status_code == 200 and "X-Evil" not in answer.headers
    said = answer.headers["X-Kvserve-Skipped"]
    assert said.startswith("tools[0] (a??X-Evil: 1?), tools[1] (bbb") and len(said) == 1000
