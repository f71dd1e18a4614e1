"""Reasoning and tool calls come out the same in one piece and cut anywhere."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from kvserve.server.parsers.message_parser import MessageParser
from kvserve.server.parsers.reasoning import ReasoningParser, ReasoningSplit
from kvserve.server.parsers.tool_parsers import PARSERS, REQUIRED, ToolSplit, ToolSyntax

Message = dict[str, Any]


def fold(deltas: list[Any]) -> Message:
    """What a client puts together."""
    message: Message = {"reasoning": "", "content": "", "calls": []}
    for delta in deltas:
        assert delta.get("reasoning") == delta.get("reasoning_content")
        message["reasoning"] += delta.get("reasoning", "")
        message["content"] += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if call["index"] == len(message["calls"]):
                assert call["id"] and call["type"] == "function"
                message["calls"].append([function["name"], ""])
            message["calls"][call["index"]][1] += function["arguments"]
    return message


def parse(make: Any, text: str) -> Message:
    """The message, after checking that cuts change nothing."""
    whole = fold(make().push(text, True))
    rng = random.Random(0)
    for pieces in (len(text), 3, 7):
        cuts = sorted({0, len(text), *rng.choices(range(len(text) + 1), k=pieces)})
        if pieces == len(text):
            cuts = list(range(len(text) + 1))
        parser = make()
        deltas = [
            delta for a, b in itertools.pairwise(cuts) for delta in parser.push(text[a:b], False)
        ]
        assert fold(deltas + parser.push("", True)) == whole
    return whole


def with_tools(syntax: ToolSyntax, parallel: bool = True) -> Any:
    return lambda: MessageParser(None, ToolSplit(syntax, parallel))


A, B = '{"city": "Z\\u00fcrich, \\"old\\" {town}", "days": [1, 2]}', '{"x": {"y": null}}'


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        (
            "hermes",
            f'Let me see.\n<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>\n'
            f'<tool_call>{{"arguments": {B}, "name": "g"}}</tool_call>',
            "Let me see.\n",
        ),
        (
            "llama3_json",
            f'{{"name": "f", "parameters": {A}}}; {{"name": "g", "parameters": {B} }}',
            "",
        ),
        (
            "llama3_json",
            f'<|python_tag|>{{"name": "f", "parameters": {A}}};{{"name": "g", "parameters":{B}}}',
            "",
        ),
        (
            "mistral",
            f'Sure[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}, '
            f'{{"name": "g", "arguments": {B}}}]',
            "Sure",
        ),
        ("mistral", f"[TOOL_CALLS]f{A}[TOOL_CALLS]g[ARGS]{B}", ""),
        (
            "internlm",
            f'Hm<|action_start|><|plugin|>\n{{"name": "f", "parameters": {A}}}<|action_end|>\n'
            f'<|action_start|><|plugin|>{{"name": "g", "parameters": {B}}}<|action_end|>',
            "Hm",
        ),
    ],
)
def test_tool_calls(name: str, text: str, content: str) -> None:
    message = parse(with_tools(PARSERS[name]), text)
    assert message["content"] == content
    assert message["calls"] == [["f", A], ["g", B]]
    assert [json.loads(arguments) for _, arguments in message["calls"]]
    single = parse(with_tools(PARSERS[name], parallel=False), text)
    assert single["calls"] == [["f", A]]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "text",
    ["", "just text", "a < b", "<tool", "[TOOL", "{", '{"a": 1}', "[1, 2]", "<|action_start|>"],
)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    message = parse(with_tools(PARSERS[name]), text)
    # An unfinished object at the very start may still become a call; it is not shown.
    assert message["content"] == ("" if (name, text) == ("llama3_json", "{") else text)
    assert message["calls"] == []


def test_garbage_between_the_marks_is_content() -> None:
    text = "<tool_call>no json</tool_call> after"
    message = parse(with_tools(PARSERS["hermes"]), text)
    assert message["calls"] == [] and message["content"].endswith("no json</tool_call> after")


def test_what_the_required_grammar_makes() -> None:
    text = f'[{{"name": "f", "parameters": {A}}}, {{"name": "g", "parameters": {B}}}]'
    assert parse(with_tools(REQUIRED), text)["calls"] == [["f", A], ["g", B]]


def test_an_unfinished_call_shows_what_there_is() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert parse(with_tools(PARSERS["hermes"]), text)["calls"] == [["f", '{"a": "b']]


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (True, "so\nit is</think>\n\n42", ("so\nit is", "42")),
        (True, "<think>\nso</think>42", ("so", "42")),
        (True, "never ends", ("never ends", "")),
        (None, "<think>\nso\n</think>\n\n42</think>", ("so", "42</think>")),
        (None, "no thoughts <think>", ("", "no thoughts <think>")),
        (None, "<thin", ("", "<thin")),
        (False, "<think> is a word", ("", "<think> is a word")),
        (False, "42", ("", "42")),
    ],
)
def test_reasoning(inside: bool | None, text: str, expected: tuple[str, str]) -> None:
    message = parse(lambda: MessageParser(ReasoningSplit(inside), None), text)
    assert (message["reasoning"].rstrip("\n"), message["content"]) == expected


def test_reasoning_before_a_call() -> None:
    text = '<think>hm</think>ok<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = parse(lambda: MessageParser(ReasoningSplit(None), ToolSplit(PARSERS["hermes"])), text)
    assert message == {"reasoning": "hm", "content": "ok", "calls": [["f", "{}"]]}


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("deepseek_r1", "<assistant>", True),
        ("deepseek_r1", "<assistant><think>\n", True),
        ("deepseek_r1", "<assistant><think>\n\n</think>\n\n", False),
        ("qwen3", "<assistant>", None),
        ("qwen3", "<assistant><think>\n", True),
        ("qwen3", "<assistant><think>\n\n</think>\n\n", False),
    ],
)
def test_where_the_output_starts(name: str, prompt: str, expected: bool | None) -> None:
    assert ReasoningParser(name, 7).begins_inside(prompt) is expected
