"""Marks of calls where a model should not have written them, or has forgotten them."""

from __future__ import annotations

import json
import random

import pytest

from kvserve.server.parsers.message_parser import MessageParser
from kvserve.server.parsers.reasoning import ReasoningSplit
from kvserve.server.parsers.tool_formats import FORMATS
from kvserve.server.parsers.tool_parsers import ToolSplit
from tests.server.openai.test_parsers import CALL, CALLS, parse, with_tools

IN_REASONING = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": {"a": "</think>"}}\n</tool_call>',
        "</think>",
    ),
    "xml": (
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        1,
    ),
    "bare xml": ("<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", 1),
    "glm": ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", 1),
    "llama3_json": ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', 1),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        1,
    ),
    "kimi_k2": (f"{CALLS['kimi_k2']}<|tool_calls_section_end|>", 1),
    "pythonic": (f"{CALLS['pythonic']}<|tool_call_end|>", 1),
    **{n: (CALLS[n], 1) for n in ("mistral", "hunyuan_a13b", "minimax_m2", "gemma4", "olmo3")},
    "nemotron": ('<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>', 1),
}


@pytest.mark.parametrize("name", IN_REASONING)
@pytest.mark.parametrize("inside", [True, None])
def test_a_call_ends_the_reasoning(name: str, inside: bool | None) -> None:
    """Kind: two parsers in a row, of which the first swallows the second's marks: a call before
    ``</think>``, which the prompt or the model has opened, ended an agent's loop without a word."""
    form = FORMATS.get(name, FORMATS["hermes"])
    call, value = IN_REASONING[name]

    def make() -> MessageParser:
        return MessageParser(ReasoningSplit(inside), ToolSplit(form, {"f": {}}, True, inside))

    begin = "" if inside else "<think>\n"
    # A mark that no call follows is a part of the reasoning.
    thought = "I write <tool_call> or <function=g>, [TOOL_CALLS] or {."
    for tail, content in (("", ""), ("\n</think>\n\nDone", "Done"), ("Done", "Done")):
        message = parse(make, f"{begin}{thought}\n{call}{tail}")
        assert message["reasoning"] == thought
        assert [(n, json.loads(a)) for n, a in message["calls"]] == [("f", {"a": value})]
        assert message["content"] == content
    behind = parse(make, f"{begin}{thought}\n</think>\n\n{call}")
    assert (behind["reasoning"], behind["content"], len(behind["calls"])) == (thought, "", 1)
    plain = parse(make, f"{begin}{thought}\n</think>\n\nNo call </think>.")
    assert (plain["reasoning"], plain["content"]) == (thought, "No call </think>.")


def test_a_bare_call_comes_behind_the_reasoning() -> None:
    """Kind: what begins without a mark does so in the answer, not in the thoughts."""
    form = FORMATS["llama3_json"]
    call = '{"name": "f", "parameters": {"a": 1}}'

    def make() -> MessageParser:
        return MessageParser(ReasoningSplit(True), ToolSplit(form, {"f": {}}, True, True))

    message = parse(make, f"{call} is what I write.</think>\n{call}")
    assert message["reasoning"] == f"{call} is what I write."
    assert message["calls"] == [["f", '{"a": 1}']] and not message["content"]


ONE = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
FORGOTTEN = [
    ("hermes", f"I look.\n\n{ONE}\n</tool_call>", "I look.\n\n", 1),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\n{ONE}\n</tool_call>", "", 2),
    ("hermes", f"{ONE}\n{ONE}", "", 2),
    ("hermes", f"{ONE}\nDone.", "Done.", 1),
    ("hermes", ONE.replace("\n</function>", "") + "\n</tool_call>", "", 1),
    ("hermes", ONE.replace("\n</parameter>", "") + "\n</tool_call>", "", 1),
    ("hermes", ONE.replace("=f", "=g"), ONE.replace("=f", "=g"), 0),
    ("hermes", "Write `<function=f>` for it, as in <function=f> x.", None, 0),
    ("hermes", '{"name": "f", "arguments": {}}', None, 0),
    (
        "hermes",
        "I look.\n\nf\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "I look.\n\n",
        1,
    ),
    ("hermes", "f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>Done.", "Done.", 1),
    ("hermes", "Write <arg_key>, or f<arg_key> for f.", None, 0),
    ("hermes", "elf\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", None, 0),
    ("kimi_k2", f"Hm {CALLS['kimi_k2'].removeprefix('<|tool_calls_section_begin|>')}", "Hm ", 1),
    ("deepseek_v3", CALLS["deepseek_v3"].removeprefix("<｜tool▁calls▁begin｜>"), "", 1),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FORGOTTEN)
def test_marks_that_models_forget(name: str, text: str, content: str | None, calls: int) -> None:
    """Kind: a call without the mark before it; what belongs to no call alone begins one."""
    message = parse(with_tools(FORMATS[name], tools={"f": {}}), text)
    assert message["calls"] == [["f", '{"a": 1}']] * calls
    assert message["content"] == (text if content is None else content)


VALUES = [
    "x </parameter> y",
    "use </function> here",
    "</parameter>",
    "a <parameter=a> b",
    "</tool_call>",
    "<tool_call>",
    "Write <function=f><parameter=a>1</parameter></function> like so.",
    "Write <tool_call><function=f><parameter=a>1</parameter></function></tool_call> like so.",
    "end of line </parameter>\nnext </function>\nlast",
    "",
    "\n\nspaced\n\n",
    "  indented",
    "</arg_value> and </arg_key>",
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("style", ["lines", "one line", "glm"])
def test_a_value_may_hold_the_letters_of_marks(value: str, style: str) -> None:
    """Kind: an end mark that is looked for anywhere cuts what an agent writes into a file."""
    if style == "one line" and value.startswith("Write <tool_call>"):
        return  # a whole call, as it would end
    pair = {
        "lines": "<parameter={}>\n{}\n</parameter>\n",
        "one line": "<parameter={}>{}</parameter>",
        "glm": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    }[style]
    body = pair.format("a", value) + pair.format("b", "2")
    text = f"f\n{body}" if style == "glm" else f"<function=f>\n{body}</function>\n"
    text = f"<tool_call>{text}</tool_call>"
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    read = value.removeprefix("\n").removesuffix("\n") if style != "lines" else value
    for whole in (text, f"{text}\n{text}"):
        message = parse(with_tools(FORMATS["hermes"], tools={"f": schema}), whole)
        assert message["content"] == ""
        for _, arguments in message["calls"]:
            assert json.loads(arguments) == {"a": read, "b": "2"}
        assert len(message["calls"]) == whole.count(text)


@pytest.mark.parametrize("name", FORMATS)
def test_cuts_change_nothing_of_reasoning_with_calls(name: str) -> None:
    """Whatever a model writes: marks of both kinds in any order."""
    form = FORMATS[name]
    parts = (
        *(*form.all_marks, *form.heads, "<think>", "</think>", "\n</think>\n\n", "<think>\n", "x"),
        *("\n", "\n\n", "<", "</", "{", '"', "[", CALL, CALLS.get(name, CALL), ONE, "</parameter>"),
        *("\n</parameter>\n", "<parameter=a>", "<function=f>", "</function>", "</arg_value>"),
        *("f\n<arg_key>a</arg_key><arg_value>", "<function=g>", "é"),
    )
    rng = random.Random(name)
    called = 0
    for inside in (True, None, False):
        for _ in range(40):
            text = "".join(rng.choices(parts, k=rng.randrange(1, 14)))
            message = parse(
                lambda inside=inside: MessageParser(
                    ReasoningSplit(inside), ToolSplit(form, {"f": {}}, True, inside)
                ),
                text,
            )
            called += bool(message["calls"])
    assert called
