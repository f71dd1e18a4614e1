"""How the known families of models write calls of tools."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = r"(?P<name>[\w.-]{1,128})"


@dataclass(frozen=True)
class ToolFormat:
    """``opens`` are marks that begin calls, ``closes`` those that end them.

    ``calls`` are the ways in which one call may be written (``tool_parsers`` reads them). With
    ``at_start``, calls may also begin without a mark, where the text begins with one of these
    characters. ``heads`` begin a call where the model has forgotten the mark before it. ``between``
    and ``marks`` may stand between calls. ``named``: what comes before the arguments where calls
    are a name and its JSON object.
    """

    name: str
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ("object",)
    at_start: str = ""
    between: str = " \n\r\t"
    marks: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    named: re.Pattern[str] | None = None
    id_length: int = 24

    @property
    def all_marks(self) -> tuple[str, ...]:
        return (*self.opens, *self.closes, *self.marks)


_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_LIST = " \n\r\t[],"

FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            "hermes",
            (
                *("<tool_call>", "<tool_calls>", "<seed:tool_call>", "<TOOLCALL>", "<|tool_call|>"),
                *("<|START_ACTION|>", "<|action_start|><|plugin|>", "<|tools_prefix|>"),
                *("<|function_call|>", "functools"),
            ),
            (
                *("</tool_call>", "</tool_calls>", "</seed:tool_call>", "</TOOLCALL>"),
                *("<|/tool_call|>", "<|END_ACTION|>", "<|action_end|>", "<|tools_suffix|>"),
            ),
            ("object", "function", "named", "keys"),
            between=_LIST,
            marks=("</function>",),
            heads=("<function=",),
            named=re.compile(f"<function={_NAME}>" + r"\s*(?=\{)"),
        ),
        ToolFormat(
            "llama3_json",
            ("<|python_tag|>", "<|python_start|>"),
            at_start="{[",
            between=_LIST + ";",
            marks=("<|python_end|>",),
        ),
        ToolFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            calls=("object", "named"),
            between=_LIST,
            named=re.compile(_NAME + r"\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*(?=\{)"),
            id_length=9,
        ),
        ToolFormat(
            "deepseek_v3",
            _DEEPSEEK[:1],
            _DEEPSEEK[1:],
            calls=("named",),
            between=" \n\r\t`",
            marks=("<｜tool▁call▁end｜>",),
            heads=("<｜tool▁call▁begin｜>",),
            named=re.compile(
                r"<｜tool▁call▁begin｜>(?:\s*function\s*<｜tool▁sep｜>)?\s*"
                + _NAME
                + r"\s*(?:<｜tool▁sep｜>\s*)?(?:```(?:json)?\s*)?(?=\{)"
            ),
        ),
        ToolFormat(
            "kimi_k2",
            _KIMI[:1],
            _KIMI[1:],
            calls=("named",),
            marks=("<|tool_call_end|>",),
            heads=("<|tool_call_begin|>",),
            named=re.compile(
                r"<\|tool_call_begin\|>\s*(?:functions\.)?"
                + _NAME
                + r"(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
            ),
        ),
        ToolFormat(
            "hunyuan_a13b",
            ("<tool_calls>",),
            ("</tool_calls>",),
            calls=("object", "named"),
            between=_LIST + "`",
            marks=("<tool_call>", "</tool_call>"),
            named=re.compile(_NAME + r"\s*```(?:json)?\s*(?=\{)"),
        ),
        ToolFormat(
            "minimax_m2",
            ("<minimax:tool_call>", "<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"),
            ("</minimax:tool_call>", "</｜DSML｜tool_calls>", "</｜DSML｜function_calls>"),
            calls=("invoke", "dsml", "param"),
            heads=('<invoke name="', '<｜DSML｜invoke name="', '<function name="'),
        ),
        ToolFormat(
            "gemma4",
            ("<|tool_call>", "<start_function_call>"),
            ("<tool_call|>", "<end_function_call>"),
            calls=("escaped",),
        ),
        ToolFormat("olmo3", ("<function_calls>",), ("</function_calls>",), calls=("python call",)),
        ToolFormat(
            "pythonic",
            ("<|tool_call_start|>", "<|python_start|>"),
            ("<|tool_call_end|>", "<|python_end|>"),
            ("python",),
            at_start="[",
        ),
    )
}
"""By the name of ``--tool-call-parser``. Between Hermes' marks, and others like them, stand JSON
objects, the XML of Qwen3-Coder (``<function=name>``) or of GLM (``<arg_key>``)."""

REQUIRED = ToolFormat("required", at_start="{[", between=_LIST)
"""The form of calls under ``tool_choice: required``, for every model: a grammar forces it."""
