"""What clients send as history reaches each template in the form that it wants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvserve.engine.frontend.chat_template import Forms
from kvserve.engine.frontend.template_probe import find_forms
from kvserve.log import ConfigError, RequestError
from kvserve.server.openai import prompts
from kvserve.server.parsers.chat_format import CallWriting, find_format
from kvserve.server.state.beside import within
from tests.server.conftest import RunningServer, StartServer, payloads
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.openai import templates

CITY = '{"city": "Zürich", "n": 3}'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


class TemplateTokenizer(FakeTokenizer):
    """The fake tokenizer with a real template."""

    def __init__(self, template: str) -> None:
        self.template = template
        self._forms: Forms | None = None

    def forms(self, chat_template: str | None = None) -> Forms:
        self._forms = self._forms or find_forms(self._render)
        return self._forms

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: Any = None, **kwargs: Any
    ) -> str:
        forms, tools = self.forms(), kwargs.pop("tools", None)
        try:
            return self._render(forms.apply(messages), tools=forms.tools(tools), **kwargs)
        except Exception as error:
            raise RequestError(f"the chat template failed: {error}", param="messages") from error

    def _render(
        self, messages: Any, tools: Any = None, continue_final_message: bool = False, **kwargs: Any
    ) -> str:
        kwargs = {"add_generation_prompt": True, **kwargs}
        made: Any = render_jinja_template([messages], tools, chat_template=self.template, **kwargs)
        return str(made[0][0])


def call(name: str = "weather", arguments: Any = CITY, call_id: str = "call_0123456789") -> Any:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any = "rain", call_id: str = "call_0123456789") -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER: Any = {"role": "user", "content": "w?"}
CALLING = ["QWEN", "LLAMA", "DEEPSEEK", "MISTRAL", "HARMONY"]


@cache
def tokenizer_of(name: str) -> TemplateTokenizer:
    return TemplateTokenizer(getattr(templates, name))


def prompt(name: str, *messages: Any, **more: Any) -> str:
    return tokenizer_of(name).render_chat(messages, **more)


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    "assistant",
    [
        {"content": None, "tool_calls": [call()]},
        {"content": "", "tool_calls": [call()]},
        {"content": "I look.", "tool_calls": [call()]},
        {"tool_calls": [call()], "refusal": None, "annotations": [], "audio": None},
        {"content": [], "tool_calls": [call(arguments=json.loads(CITY))]},
        {"content": None, "tool_calls": [], "function_call": call()["function"]},
    ],
)
def test_a_call_is_in_the_prompt(name: str, assistant: Any) -> None:
    """Kind: one form for all templates; null, text and object (CASES F4)."""
    text = prompt(name, USER, {"role": "assistant", **assistant}, result())
    assert "weather" in text and '"city": "Zürich"' in text and "rain" in text
    assert "None" not in text and '\\"' not in text and (assistant.get("content") or "") in text


@pytest.mark.parametrize("name", [*CALLING, "PLAIN", "PARTS"])
@pytest.mark.parametrize("calls", [[], None])
def test_empty_calls_are_as_none(name: str, calls: Any) -> None:
    """Kind: history as clients echo it (CASES F3)."""
    assistant = {"role": "assistant", "content": "Hello!"}
    echoed = {**assistant, "tool_calls": calls, "function_call": None, "reasoning_content": None}
    assert prompt(name, USER, echoed, USER) == prompt(name, USER, assistant, USER)
    assert "Hello!" in prompt(name, USER, assistant, USER)


@pytest.mark.parametrize("name", ["LLAMA", "HARMONY"])
def test_a_result_stays_behind_its_own_call(name: str) -> None:
    """Kind: odd histories. The first call may have no result: an agent was stopped."""
    calls = [call(call_id="call_a"), call(arguments='{"n": 4}', call_id="call_b")]
    history = [USER, {"role": "assistant", "tool_calls": calls}, result("rain", "call_b")]
    text = prompt(name, *history)
    assert text.index("Zürich") < text.index('"n": 4') < text.index("rain")
    text = prompt(name, *history, result("sun", "call_a"))
    assert text.index("Zürich") < text.index("sun") < text.index('"n": 4') < text.index("rain")


@pytest.mark.parametrize("name", CALLING)
def test_arguments_that_are_null_are_none(name: str) -> None:
    def asked(arguments: Any) -> str:
        calls = [call(arguments=arguments)]
        return prompt(name, USER, {"role": "assistant", "tool_calls": calls}, result())

    assert asked("null") == asked("{}") == asked(None) == asked("")


def test_half_a_character_of_an_earlier_call_is_no_error(start_server: StartServer) -> None:
    """Kind: what an answer has said comes back. An escape is JSON, and no tokenizer reads it."""
    server = start_server(FakeEngine(2000, tokenizer=TemplateTokenizer(templates.QWEN)))
    half = call(arguments='{"city": "\\ud83d"}')
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [half]}, result()]
    answer = server.post("/v1/chat/completions", messages=messages, tools=[TOOL])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "name", ["PLAIN", "PARTS", "CHATML", "GEMMA", "NO_SYSTEM", "IN_PLACE", "REPLACES"]
)
def test_calls_that_a_template_does_not_write_are_text(
    name: str, start_server: StartServer
) -> None:
    """Kind: the turn behind a call that a grammar has forced: an agent cannot leave it out."""
    calls = [call(), call(call_id="call_b")]
    turn = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    history = [{"role": "system", "content": "be"}, USER, turn, result(), result("sun", "call_b")]
    text = prompt(name, *history)
    for words in ("I look.", '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"'):
        assert words in text
    assert text.index("rain") < text.index("sun") and "be" in text
    assert "the next" in prompt(name, *history, {"role": "user", "content": "the next"})
    server = start_server(FakeEngine(2000, tokenizer=tokenizer_of(name)))
    answer = server.post("/v1/chat/completions", messages=history)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Kvserve-Skipped"] == "tool_calls (as text)"


FOUND = {
    "QWEN": "hermes",
    "LLAMA": "llama3_json",
    "DEEPSEEK": "deepseek_v3",
    "MISTRAL": "mistral",
    "PLAIN": None,
    "UNKNOWN": None,
}


@pytest.mark.parametrize("name", FOUND)
def test_the_format_of_calls_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found = find_format(TemplateTokenizer(getattr(templates, name)), None, None, None)
    assert (found.tools and found.tools.name) == FOUND[name]
    assert ("in a form that no --tool-call-parser knows" in caplog.text) == (name == "UNKNOWN")
    assert ("does not write tools" in caplog.text) == (name == "DEEPSEEK")


ENDLESS = "{% set r = range(99999) %}" + "{% for a in r %}" * 4 + "{{ a }}" + "{% endfor %}" * 4


class EndlessTokenizer(FakeTokenizer):
    """Its own template is the fake one; one that a request brings is rendered."""

    def forms(self, chat_template: str | None = None) -> Forms:
        return Forms() if chat_template is None else TemplateTokenizer(chat_template).forms()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_requests_template_that_never_ends_is_stopped(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Kind: a thread that no one can leave behind: four such requests, and texts wait for ever."""
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.2)
    engine = FakeEngine(tokenizer=EndlessTokenizer())
    server = start_server(engine, trust_request_chat_template=True)
    for _ in range(5):
        answer = server.post(path, messages=[USER], chat_template=ENDLESS)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"] == "chat_template: it does not end within 0.2 s"
    assert server.post(path, messages=[USER], chat_template="{{ messages }}").status_code == 200


def test_work_that_ends_in_time_is_left_alone() -> None:
    assert within(60, lambda: "a") == "a"
    with pytest.raises(ValueError, match="x"):
        within(60, lambda: int("x"))


def test_how_calls_are_written() -> None:
    tokenizer = TemplateTokenizer(templates.QWEN)
    assert find_format(tokenizer, None, None, None).writing == CallWriting(
        "<tool_call>\n", "\n</tool_call><tool_call>\n", "\n</tool_call>", ("name", "arguments")
    )
    tokenizer = TemplateTokenizer(templates.MISTRAL)
    assert find_format(tokenizer, None, None, None).writing == CallWriting(
        "[TOOL_CALLS][", ", ", "]</s>", ("name", "arguments")
    )
    between = "\n```json\n"
    written = find_format(TemplateTokenizer(templates.DEEPSEEK), None, None, None).writing
    assert written is not None and (written.keys, written.between) == (None, between)
    assert written.after.endswith("<｜tool▁calls▁end｜>")


def test_harmony_is_found_and_read(start_server: StartServer) -> None:
    """Kind: a model family that loads, and whose format nobody reads (CASES F11)."""
    server = start_server(FakeEngine(2000, tokenizer=TemplateTokenizer(templates.HARMONY)))
    says = "<|channel|>analysis<|message|>2+2?<|end|><|start|>assistant<|channel|>final<|message|>4"
    for stream in (False, True):
        message = spoken(server, says, stream)
        assert (message["reasoning"], message["content"]) == ("2+2?", "4")
        call = (
            f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CITY}<|call|>"
        )
        message = spoken(server, call, stream, tools=[TOOL])
        assert message["calls"] == [["weather", CITY]]
        assert message["reason"] == "tool_calls"
    assert not spoken(server, says, False, include_reasoning=False)["reasoning"]


def spoken(server: RunningServer, says: str, stream: bool, **more: Any) -> dict[str, Any]:
    answer = server.chat(f"SAY[{says}]", stream=stream, **more)
    assert answer.status_code == 200, answer.text
    parts = [choice for part in payloads(answer) for choice in part["choices"]]
    deltas = [part["delta"] if stream else part["message"] for part in parts]
    reason = parts[-1]["finish_reason"]
    calls: list[Any] = []
    for delta in deltas:
        for one in delta.get("tool_calls") or ():
            if "id" in one:
                calls.append([one["function"]["name"], ""])
            calls[-1][1] += one["function"]["arguments"]
    texts = {n: "".join(d.get(n) or "" for d in deltas) for n in ("content", "reasoning")}
    return {**texts, "calls": calls, "reason": reason}


def test_an_unknown_format_is_said(start_server: StartServer) -> None:
    """Kind: parsers by hand, one by one; a format that none knows is named, not ignored."""
    tokenizer = TemplateTokenizer(templates.UNKNOWN)
    server = start_server(FakeEngine(2000, tokenizer=tokenizer))
    answer = server.chat("a", tools=[TOOL])
    assert answer.status_code == 400 and "--tool-call-parser" in answer.json()["error"]["message"]
    says = f'[{{"name": "weather", "parameters": {CITY}}}]'
    assert spoken(server, says, False, tools=[TOOL], tool_choice="required")["calls"]
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        start_server(FakeEngine(tokenizer=tokenizer), enable_auto_tool_choice=True)
    named = FakeEngine(2000, tokenizer=TemplateTokenizer(templates.UNKNOWN))
    server = start_server(named, enable_auto_tool_choice=True, tool_call_parser="hermes")
    says = f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>'
    assert spoken(server, says, True, tools=[TOOL])["calls"] == [["weather", CITY]]


def test_the_template_that_comes_along_writes_tools(start_server: StartServer) -> None:
    """Kind: a remedy that nobody has: agents on a model whose own template writes no tools."""
    server = start_server(FakeEngine(tokenizer=TemplateTokenizer(templates.CHATML)))
    assert server.chat("a", tools=[TOOL]).headers["X-Kvserve-Skipped"] == "tools"
    state = start_server(FakeEngine(), chat_template="hermes").state
    assert state.chat_template is not None
    tokenizer = TemplateTokenizer(state.chat_template)
    forms, found = tokenizer.forms(), find_format(tokenizer, None, None, None)
    assert forms.shows_tools and forms.shows_calls and not (forms.one_call or forms.split)
    assert found.tools is not None and found.tools.name == "hermes" and found.writing is not None
    system, calls = {"role": "system", "content": "be"}, [call(), call(call_id="call_b")]
    turn = {"role": "assistant", "content": "I look.", "tool_calls": calls}
    history = [system, USER, turn, result(), result("sun", "call_b"), USER, system]
    text = tokenizer.render_chat(history, tools=[TOOL])
    for words in (
        "<|im_start|>system\nbe\n\nYou may call",
        '\n<tools>\n{"type": "function", "function": {"name": "weather"',
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"city": ',
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n",
        "<|im_start|>user\nw?<|im_end|>\n<|im_start|>system\nbe<|im_end|>\n<|im_start|>assistant\n",
    ):
        assert words in text, words
    plain = TemplateTokenizer(templates.CHATML).render_chat([system, USER])
    assert tokenizer.render_chat([system, USER]) == plain
