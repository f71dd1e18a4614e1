"""Finds what a chat template wants, and what it knows.

Templates do not say what they want. Small conversations are rendered, and the first form in which
everything shows is the template's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

from kvserve.engine.frontend.chat_template import ABSENT, Forms
from kvserve.engine.frontend.efforts import find_reasons
from kvserve.engine.frontend.system_turns import Message, find_system_turns

Render = Callable[..., str]
"""Messages, and arguments of the template -> text."""
TOOL, KEY, VALUE = "kvserve_tool", "kvserve_key", "kvserve value"
_OTHER = "kvserve_other"
_TEXT, _RESULT, _THOUGHT = "kvserve text", "kvserve result", "kvserve thought"
PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"kvserve_p": {"type": "string", "description": "d"}},
                "required": ["kvserve_p"],
            },
        },
    }
]


def find_forms(render: Render) -> Forms:
    """Try a template; ``render`` may raise anything."""

    def text_of(forms: Forms, messages: Sequence[Message], tools: Any, **kwargs: Any) -> str:
        with suppress(Exception):  # what the template's author chose
            return render(forms.apply(messages), tools=forms.tools(tools), **kwargs)
        return ""

    def rendered(forms: Forms, messages: Sequence[Message], **kwargs: Any) -> str:
        # Some show less beside tools.
        texts = (text_of(forms, messages, tools, **kwargs) for tools in (PROBE_TOOLS, None))
        return next(filter(None, texts), "")

    user, call = conversation(), conversation(called_conversation())
    forms = _tools_form(text_of, user)
    nones = rendered(forms, user).count("None")

    def shows(forms: Forms, messages: Sequence[Message], *words: str) -> bool:
        text = rendered(forms, messages)
        # Not an object or None as Python prints them, nor JSON text within JSON.
        wrong = f"'{KEY}'" in text or f'\\"{KEY}' in text or text.count("None") > nones
        return all(word in text for word in words) and not wrong

    if not shows(forms, user, _TEXT) and shows(replace(forms, parts=True), user, _TEXT):
        forms = replace(forms, parts=True)
    shown = (TOOL, KEY, VALUE, _RESULT)
    ids: list[dict[str, Any]] = [{}, {"short_ids": True}, {"named_ids": True}]
    for of_ids, text, empty in product(ids, (False, True), ("", None, ABSENT)):
        tried = replace(forms, **of_ids, text_arguments=text, empty=empty)
        if shows(tried, call, *shown):
            forms = tried
            break
    else:
        forms = replace(forms, shows_calls=False)
    for change, messages, words in _odd_conversations(shown):
        changed = replace(forms, **{change: change != "after_results"})  # type: ignore[arg-type]
        if not shows(forms, messages, *words) and shows(changed, messages, *words):
            forms = changed
    system = find_system_turns(lambda messages: rendered(forms, messages))
    return replace(
        forms, system=system, reasons=find_reasons(lambda **kwargs: rendered(forms, user, **kwargs))
    )


def _tools_form(text_of: Callable[..., str], user: Sequence[Message]) -> Forms:
    """How tools show, if they do: some templates want functions alone, some a list without any."""
    least = [{"type": "function", "function": {"name": TOOL}}]
    first = [{"role": "system", "content": _TEXT}, *user]
    forms = Forms(shows_tools=False)
    for bare, parts, messages in product((False, True), (False, True), (user, first)):
        shown = Forms(bare_tools=bare, parts=parts)
        if TOOL in text_of(shown, messages, PROBE_TOOLS):
            whole = replace(shown, whole_tools=True)
            lacks = TOOL not in text_of(shown, messages, least)
            lacks = lacks and TOOL in text_of(whole, messages, least)
            forms = Forms(bare_tools=bare, whole_tools=lacks)
            break
    listed = replace(forms, empty_tools=True)
    return listed if not text_of(forms, user, None) and text_of(listed, user, None) else forms


def _odd_conversations(shown: tuple[str, ...]) -> list[tuple[str, list[Message], tuple[str, ...]]]:
    """The field of ``Forms`` that a template may need for each, and what has to show."""
    user = conversation()
    both = conversation(called_conversation(content=_TEXT + "2", reasoning=_THOUGHT))
    two = conversation(called_conversation(2))
    short, number, other = (called_conversation() for _ in range(3))
    other[0]["tool_calls"][0]["function"]["name"] = _OTHER
    short[0]["tool_calls"][0]["id"] = short[1]["tool_call_id"] = "c_1"
    number[0]["tool_calls"][0]["function"]["arguments"] = json.dumps({KEY: VALUE, "kvserve_n": 1})
    more = {"role": "user", "content": _TEXT + "3"}
    replies = [{"role": "assistant", "content": _TEXT + at} for at in "45"]
    return [
        ("short_ids", conversation(short), shown),
        ("text_values", conversation(number), shown),
        ("named_ids", conversation(other[:1]), (_OTHER,)),
        ("split", [*both, replies[0], more], (*shown, _TEXT + "2")),
        ("one_call", two, (*shown, VALUE + "1", _RESULT + "1")),
        ("merge", [*user, *user], (_TEXT,)),
        ("merge", [*user, *replies, more], (_TEXT + "4", _TEXT + "5")),
        ("no_empty", [*user, {"role": "assistant", "content": ""}, more], (_TEXT + "3",)),
        ("user_first", [replies[0], more], (_TEXT + "4", _TEXT + "3")),
        ("after_results", [*user, *called_conversation(), more], (*shown, _TEXT + "3")),
    ]


def called_conversation(count: int = 1, **more: str) -> list[Message]:
    """An assistant's message with calls, and their results."""
    calls, results = [], []
    for at in range(count):
        call_id, number = f"call_{at:024x}", str(at or "")
        function = {"name": TOOL, "arguments": json.dumps({KEY: VALUE + number})}
        calls.append({"id": call_id, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": call_id, "content": _RESULT + number})
    return [{"role": "assistant", "content": "", **more, "tool_calls": calls}, *results]


def conversation(more: Sequence[Message] = ()) -> list[Message]:
    return [{"role": "user", "content": _TEXT}, *more]


def written_calls(render: Render, count: int = 1) -> str:
    """How a template writes an assistant's message with calls; ``""`` if it does not.

    ``render`` brings messages into the template's form.
    """
    start, turn = conversation(), called_conversation(count)[:1]
    try:
        before = render(start, tools=PROBE_TOOLS, add_generation_prompt=True)
        after = render(start + turn, tools=PROBE_TOOLS, add_generation_prompt=False)
    except Exception:
        return ""
    pairs = zip(before, after, strict=False)
    same = before[: next((i for i, (a, b) in enumerate(pairs) if a != b), len(before))]
    if "<" in same[same.rfind(">") + 1 :]:  # within a mark
        same = same[: same.rfind("<")]
    return after[len(same) :]
