"""Reasoning and tool calls come out the same in one piece and cut anywhere."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest

from kvserve.server.parsers.harmony import HarmonyParser, count_reasoning
from kvserve.server.parsers.json_text import ValueEnd
from kvserve.server.parsers.message_parser import MessageParser
from kvserve.server.parsers.reasoning import ReasoningParser, ReasoningSplit
from kvserve.server.parsers.tool_formats import FORMATS, REQUIRED, ToolFormat
from kvserve.server.parsers.tool_parsers import ToolSplit
from kvserve.server.settings.serve_settings import (
    REASONING_PARSER_SYNONYMS,
    REASONING_PARSERS,
    TOOL_PARSER_SYNONYMS,
    TOOL_PARSERS,
)

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


def with_tools(syntax: ToolFormat, parallel: bool = True, tools: Any = None) -> Any:
    return lambda: MessageParser(None, ToolSplit(syntax, tools, parallel))


A, B = '{"city": "Z\\u00fcrich, \\"old\\" {town}", "days": [1, 2]}', '{"x": {"y": null}}'


FORMS = {
    **FORMATS,
    **dict.fromkeys(("internlm", "cohere"), FORMATS["hermes"]),
    "required": REQUIRED,
}


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        (
            "required",
            f'[{{"name": "f", "parameters": {A}}}, {{"name": "g", "parameters": {B}}}]',
            "",
        ),
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
    message = parse(with_tools(FORMS[name]), text)
    assert message["content"] == content
    assert message["calls"] == [["f", A], ["g", B]]
    assert [json.loads(arguments) for _, arguments in message["calls"]]
    single = parse(with_tools(FORMS[name], parallel=False), text)
    assert single["calls"] == [["f", A]]


CALL = '{"name": "f", "arguments": {"a": 1}}'
CALLS = {
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    "pythonic": "<|tool_call_start|>[f(a=1)]",
    "hunyuan_a13b": '<tool_calls><tool_call>f\n```json\n{"a": 1}\n```</tool_call></tool_calls>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
    "olmo3": "<function_calls>f(a=1)</function_calls>",
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # Kind: text that was held back for a call is given out once it is none (CASES F6).
        ("llama3_json", '{"answer": "a long answer in JSON'),
        ("llama3_json", '{"name": "Ada", "parameters": {"a": 1}}'),
        ("llama3_json", '{"name": "f", "age": 3}'),
        ("llama3_json", '{"parameters": {"a": 1}, "na'),
        ("llama3_json", '[{"name": "Ada"}]'),
        ("llama3_json", "  \n "),
        ("llama3_json", '<|python_tag|>print("hi")'),
        ("hermes", "<tool_call>no json</tool_call> after"),
        ("hermes", "Look: <tool_call>"),
        ("hermes", '<tool_call>\n{"name'),
        ("hermes", '<tool_call>\n{"name": "f"'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments":'),
        ("hermes", '<tool_call>{"name": "no_tool", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call></tool_call>"),
        ("hermes", "<tool_call><function=f><parameter=a>1"),
        ("hermes", "<tool_call>f\n<arg_key>a</arg_key>"),
        ("mistral", "[TOOL_CALLS] none"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js",
        ),
        ("pythonic", "[f(a=1), g("),
        ("pythonic", "[f(a=x)]"),
        ("pythonic", "[1, 2, 3]"),
        # Kind: a name that is no text of JSON (DOORS 7).
        ("llama3_json", r'{"name": "\q", "parameters": {}}'),
        ("llama3_json", '{"name": "f\n", "parameters": {}}'),
        ("hermes", r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 5000),
        ("hermes", '<tool_call>{"arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>"),
        ("hermes", "f\n<arg_key>a</arg_key>"),
        ("hermes", "Take h\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
        ("gemma4", "<|tool_call>call:h{a:1}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f{a:<escape>1<tool_call|>"),
        ("minimax_m2", '<invoke name="h"><parameter name="a">1</parameter></invoke>'),
        ("olmo3", "<function_calls>print(1)</function_calls>"),
        ("pythonic", "[f(a=" + "[" * 5000 + "]" * 5000 + ")]"),
    ],
)
def test_what_becomes_no_call_is_content(name: str, text: str) -> None:
    message = parse(with_tools(FORMATS[name], tools={"f": {}, "g": {}}), text)
    assert (message["content"], message["calls"]) == (text, [])


@pytest.mark.parametrize("name", FORMATS)
def test_nothing_of_a_text_is_lost(name: str) -> None:
    """Whatever a model writes: without calls it is all content, and cuts change nothing."""
    form = FORMATS[name]
    texts = ["", "just text", "a < b", "<tool", "[TOOL", "{", '{"a": 1}', "[1, 2]"]
    for text in (*texts, "<|action_start|>"):
        assert parse(with_tools(form), text) == {"reasoning": "", "content": text, "calls": []}
    parts = (
        *form.all_marks, "{", "}", "[", "]", '"name"', ": ", '"f"', '"g"', ", ", '"arguments"',
        '"parameters"', '"a"', "1", "\\", "f", "(a=1)", "<function=f>", "</function>", " and ",
        "<parameter=a>", "</tool_call>", "[ARGS]", "é", '{"a": "}"}', "'", "f\n<arg_key>", "\n",
        "```json\n", CALL, CALLS.get(name, "".join(form.opens[:1]) + CALL),
    )  # fmt: skip
    rng = random.Random(name)
    called = 0
    for _ in range(100):
        text = "".join(rng.choices(parts, k=rng.randrange(1, 12)))
        message = parse(with_tools(form, tools={"f": {}}), text)
        called += bool(message["calls"])
        assert message["calls"] or message["content"] == text
        assert all(called_name == "f" for called_name, _ in message["calls"])
    assert called


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"id": 1, "name": "f", "arguments": {}, "x": "}"}', "{}"),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
            '{"a": 1}',
        ),
        (
            "hermes",
            "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=s>\n3\n\n"
            "</parameter>\n<parameter=o>{\"x\": [true]}</parameter>\n</function>\n</tool_call>",
            '{"n": 3, "s": "3\\n", "o": {"x": [true]}}',
        ),
        (
            "hermes",
            "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>s</arg_key>"
            "<arg_value>4</arg_value>\n</tool_call>",
            '{"n": 3, "s": "4"}',
        ),
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            '{"a": 1}',
        ),
        (
            "deepseek_v3",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            '{"a": 1}',
        ),
        (
            "kimi_k2",
            f"{CALLS['kimi_k2']}<|tool_calls_section_end|>",
            '{"a": 1}',
        ),
        ("pythonic", "[f(a=1, b='x', c=[True, None])]", '{"a": 1, "b": "x", "c": [true, null]}'),
        ("llama3_json", '[{"name": "f", "parameters": {"a": 1}}]', '{"a": 1}'),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', '{"a": 1}'),
        # Kind: arguments that no client can read, or no answer can hold.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {\n"a\t": "b\n\\"\n", "c": 1}}</tool_call>',
            '{\n"a\\t": "b\\n\\"\\n", "c": 1}',
        ),
        (
            "hermes",
            '<tool_call>{"arguments": {"a": "b\n"}, "name": "f"}</tool_call>',
            '{"a": "b\\n"}',
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>',
            '{"a": "\ufffd"}',
        ),
        ("hermes", "<tool_call><function=f><parameter=a>NaN</parameter><parameter=b>1e999"
         '</parameter><parameter=c>"\\ud83d"</parameter></function></tool_call>',
         '{"a": "NaN", "b": "1e999", "c": "\\ud83d"}'),
        ("pythonic", '[f(a="\\ud83d", b=10**2)]', None),
        ("pythonic", '[f(a="\\ud83d")]', '{"a": "\\ud83d"}'),
        ("pythonic", "[f(a=1e999)]", None),
        ("pythonic", "[f(a=1, **{'b': 2})]", '{"a": 1, "b": 2}'),
        ("pythonic", "[f(**[1])]", None),
        # Forms of further families, as their templates write them.
        *((name, text, '{"a": 1}') for name, text in CALLS.items()),
        ("hermes", '<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n'
         "</seed:tool_call>\n", '{"a": 1}'),
        ("hermes", "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n"
         "<arg_value>1</arg_value>\n</tool_call>\n</tool_calls>", '{"a": 1}'),
        ("hermes", f'<tool_call>\n[\n{{"type": "function", "function": {CALL}}}\n]\n</tool_call>',
         '{"a": 1}'),
        ("hermes", f"functools[{CALL}]", '{"a": 1}'),
        ("hermes", f"<|function_call|>{CALL}", '{"a": 1}'),
        ("hermes", '<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>', '{"a": 1}'),
        ("hermes", '<function=f>{"a": 1}</function>', '{"a": 1}'),
        ("hermes", "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", '{"a": 1}'),
        ("minimax_m2", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
         'name="a" string="false">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
         "</｜DSML｜tool_calls>", '{"a": 1}'),
        ("minimax_m2", '<function name="f"><param name="a">1</param></function>', '{"a": 1}'),
        ("gemma4", '<|tool_call>call:f{b:[<|"|>x{,"y":<|"|>,true],o:{<|"|>k<|"|>:2.5},s:<|"|>'
         '<|"|>}<tool_call|>', '{"b": ["x{,\\"y\\":", true], "o": {"k": 2.5}, "s": ""}'),
        ("gemma4", "<start_function_call>call:f{s:<escape>a: 1<escape>}<end_function_call>",
         '{"s": "a: 1"}'),
        ("olmo3", '<function_calls>f(a="(x)", b=true, c=null)</function_calls>',
         '{"a": "(x)", "b": true, "c": null}'),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}'
         "]<|END_ACTION|>", "{}"),
    ],
)  # fmt: skip
def test_a_call_as_models_write_it(name: str, text: str, arguments: str | None) -> None:
    properties = {"s": {"type": "string"}, "n": {"type": "integer"}}
    message = parse(with_tools(FORMS[name], tools={"f": {"properties": properties}}), text)
    if arguments is None:
        assert (message["content"], message["calls"]) == (text, [])
        return
    assert (message["content"], message["calls"]) == ("", [["f", arguments]])
    assert text.endswith(arguments) or json.loads(arguments) is not None  # or it is not finished
    arguments.encode()


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Characters that were looked at for the ends of values, and calls of ``_skip``."""
    counts = Counter[str]()
    find, skip = ValueEnd.find, ToolSplit._skip

    def counted(self: ValueEnd, text: str, start: int = 0) -> int:
        counts["characters"] += len(text) - start
        return find(self, text, start)

    def counted_skip(self: ToolSplit, at: int) -> int:
        counts["skips"] += 1
        return skip(self, at)

    monkeypatch.setattr(ValueEnd, "find", counted)
    monkeypatch.setattr(ToolSplit, "_skip", counted_skip)
    return counts


def test_long_arguments_are_read_once(looked: Counter[str]) -> None:
    """Kind: quadratic work on long texts (DOORS 14): each character is looked at once."""
    body = "x, " * 20_000
    for text in (
        f'<tool_call>{{"name": "f", "arguments": {{"a": "{body}"}}}}</tool_call>',
        f'<tool_call>{{"arguments": {{"a": "{body}"}}, "name": "f"}}</tool_call>',
    ):
        looked.clear()
        parser = ToolSplit(FORMATS["hermes"], {"f": {}})
        deltas = [
            delta
            for at in range(0, len(text), 4)
            for delta in parser.push(text[at : at + 4], at + 4 >= len(text))
        ]
        assert fold(deltas)["calls"] == [["f", f'{{"a": "{body}"}}']]
        assert looked["characters"] < len(text) + 10


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        '<tool_call>{"name": "f", "x": ',
        '<tool_call>{"arguments": {"a": "\\',
        "{",
        "[",
    ],
)
def test_a_model_that_repeats_itself_costs_no_more(looked: Counter[str], unit: str) -> None:
    """Kind: quadratic work. At its end an answer of 1,454 marks took 2.6 s of the event loop, one
    of twice as many 10.8."""
    for name in ("hermes", "llama3_json"):
        text = unit * 2000
        looked.clear()
        message = fold(ToolSplit(FORMATS[name], {"f": {}}).push(text, True))
        assert message["content"] == text
        assert looked.total() < 70 * len(text)


H, M, E, S = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{H}analysis{M}hm{E}{S}{H}final{M}4", ("hm", "4", [])),
        (f"{H}final{M}4<|return|>", ("", "4", [])),
        (f"{H}commentary{M}I look.{E}{S}{H}commentary to=functions.f <|constrain|>json{M}{A}"
         "<|call|>", ("", "I look.", [["f", A]])),
        (f" to=functions.f{H}commentary json{M}{A}<|call|>", ("", "", [["f", A]])),
        (f' to=functions.f{H}commentary json{M}{{"a": "\n"}}', ("", "", [["f", '{"a": "\\n"}']])),
        (f"{H}commentary to=functions.f{M}<|call|>", ("", "", [["f", "{}"]])),
        (f"{H}commentary to=functions.f{M}", ("", "", [])),
        (f"{H}commentary to=functions.no_tool{M}{A}<|call|>", ("", A, [])),
        (f"{H}analysis to=python{M}1 + 1<|call|>", ("1 + 1", "", [])),
        (f"{H}analysis{M}forgot{H}final{M}4", ("forgot", "4", [])),
        (f"{H}analysis{M}cut", ("cut", "", [])),
        (f"{H}analysis", ("", "", [])),
        ("no format at all, 1 < 2", ("", "no format at all, 1 < 2", [])),
        (f"{H}final 4 is the answer", ("", "4 is the answer", [])),
        ("", ("", "", [])),
    ],
)  # fmt: skip
def test_harmony(text: str, expected: tuple[str, str, list[Any]]) -> None:
    """Kind: a model's own format (CASES F11)."""
    message = parse(lambda: HarmonyParser({"f": {}}), text)
    assert (message["reasoning"], message["content"], message["calls"]) == expected


def test_each_name_of_a_parser_is_one() -> None:
    assert set(TOOL_PARSERS) == {*FORMATS, "openai"}
    assert set(TOOL_PARSER_SYNONYMS.values()) <= set(FORMATS)
    assert not TOOL_PARSER_SYNONYMS.keys() & set(TOOL_PARSERS)
    assert set(REASONING_PARSER_SYNONYMS.values()) <= set(REASONING_PARSERS)


def test_reasoning_of_harmony_is_counted() -> None:
    words = [H, "analysis", M, "a", "b", E, S[:9], "assistant", H, "final", M, "c"]
    assert count_reasoning(range(len(words)), lambda ids: words[ids[0]]) == 2


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
