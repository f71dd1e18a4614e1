"""How a model writes its answers: calls, reasoning, or both in harmony's channels.

The format of calls is found in how the chat template writes one: it is the one whose parser reads
the call back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from kvserve.engine.frontend.chat_template import Forms
from kvserve.engine.frontend.template_probe import KEY, TOOL, VALUE, written_calls
from kvserve.log import ConfigError, logger
from kvserve.server.parsers.harmony import MARKS, HarmonyParser
from kvserve.server.parsers.json_text import ValueEnd
from kvserve.server.parsers.reasoning import ReasoningParser
from kvserve.server.parsers.tool_formats import FORMATS, ToolFormat
from kvserve.server.parsers.tool_parsers import Json, ToolSplit

HARMONY_TOOLS, HARMONY_REASONING = "openai", "openai_gptoss"
"""vLLM's names of the parsers."""

_CALL = re.compile(rf'{TOOL}((?:(?!{TOOL}).)*?)\{{\s*"{KEY}"\s*:\s*"{VALUE}1?"\s*\}}', re.DOTALL)
_OBJECT_HEAD = re.compile(r'\{[^{}]*"((?:tool_)?name)"\s*:\s*"$')
_ARGUMENTS_KEY = re.compile(r'"\s*,\s*"(arguments|parameters)"\s*:\s*')


class ChatTokenizer(Protocol):
    """The part of a tokenizer that shows a model's format."""

    @property
    def added_tokens(self) -> Mapping[str, tuple[int, bool]]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def forms(self, chat_template: str | None = None) -> Forms: ...
    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str: ...


class DeltaParser(Protocol):
    """Makes deltas of a message from its growing text; the last piece comes with ``final``."""

    def push(self, text: str, final: bool) -> list[Json]: ...
    def finish_reason(self, reason: str | None) -> str | None: ...


@dataclass(frozen=True)
class CallWriting:
    """What the template writes around calls.

    A call is a JSON object with ``keys`` for its name and its arguments, or its name, ``between``
    and its arguments as a JSON object. ``before`` the first call, ``next`` before the others
    (``None`` if a message has one call), ``after`` the last one.
    """

    before: str
    next: str | None
    after: str
    keys: tuple[str, str] | None = None
    between: str = ""


@dataclass(frozen=True)
class ChatFormat:
    """``tools`` is ``None`` if it is not known how calls are written."""

    tools: ToolFormat | None = None
    writing: CallWriting | None = None
    reasoning: ReasoningParser | None = None
    harmony: bool = False
    tokens: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    """The tokenizer's ``added_tokens``."""

    def skips_marks(self, tools: bool) -> bool:
        """Whether marks that the parser needs would be left out, as special tokens are."""
        marks = self.tools.all_marks if tools and self.tools is not None else ()
        marks = MARKS if self.harmony else marks
        skipped = [text for text, (_, special) in self.tokens.items() if special]
        return any(text in mark for mark in marks for text in skipped)


def find_format(
    tokenizer: ChatTokenizer | None,
    template: str | None,
    tool_parser: str | None,
    reasoning_parser: str | None,
) -> ChatFormat:
    """The format of a model, whose flags name what the template does not show.

    Raises ``ConfigError`` if the tokenizer lacks what a flag needs.
    """
    if tokenizer is None:
        if reasoning_parser is not None:
            raise ConfigError("--reasoning-parser needs a tokenizer")
        return ChatFormat(FORMATS.get(tool_parser or ""))
    one, two = _written(tokenizer, template, 1), _written(tokenizer, template, 2)
    named = tool_parser == HARMONY_TOOLS or reasoning_parser == HARMONY_REASONING
    found = tool_parser is None and reasoning_parser is None and _reads(HarmonyParser([TOOL]), one)
    tokens = tokenizer.added_tokens
    if named or found:
        return ChatFormat(harmony=True, tokens=tokens)
    if tool_parser is None:
        read = (f for f in FORMATS.values() if _reads(ToolSplit(f, {TOOL: {}}), one))
        tools = next(read, None)
    else:
        tools = FORMATS[tool_parser]
    writing = None if tools is None else _writing(tools, one, two, tokens)
    reasoning = None
    if reasoning_parser is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        reasoning = ReasoningParser.of(reasoning_parser, encode)
    if tools is None and one:
        logger.warning(
            "the chat template writes tool calls in a form that no --tool-call-parser knows "
            "(%.200r): tools work with tool_choice required or a named function only",
            one,
        )
    if not tokenizer.forms(template).shows_tools and tools is not None:
        logger.warning(
            "the chat template does not write tools: the model sees none; --chat-template takes "
            "one that does (hermes comes with kvserve, for models of ChatML)"
        )
    return ChatFormat(tools, writing, reasoning, tokens=tokens)


def _written(tokenizer: ChatTokenizer, template: str | None, count: int) -> str:
    forms = tokenizer.forms(template)
    if not forms.shows_calls or (count > 1 and forms.one_call):
        return ""
    return written_calls(partial(tokenizer.render_chat, chat_template=template), count)


def _reads(parser: HarmonyParser | ToolSplit, written: str) -> bool:
    """Whether the parser finds the call in what the template writes."""
    pieces = [call for delta in parser.push(written, True) for call in delta.get("tool_calls", ())]
    names = "".join(piece["function"].get("name", "") for piece in pieces)
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    try:
        return (names, json.loads(arguments)) == (TOOL, {KEY: VALUE})
    except ValueError:
        return False


def _writing(
    tools: ToolFormat, one: str, two: str, tokens: Mapping[str, tuple[int, bool]]
) -> CallWriting | None:
    """What stands around a call; ``None`` if its arguments are no JSON object."""
    calls, both = list(_placed(one)), list(_placed(two))
    if len(calls) != 1:
        return None
    [(start, end, keys, between)] = calls
    marks = [at for mark in tools.opens if (at := one.find(mark)) >= 0]
    first = min(marks, default=start)
    after = one[end:]
    ends = [at + len(mark) for mark in tools.closes if (at := after.find(mark)) >= 0]
    # Without a mark that ends calls, they end where the message does.
    ends += [after.find(t) for t in tokens if t in after and t not in tools.all_marks]
    following = two[both[0][1] : both[1][0]] if len(both) == 2 else None
    last = after[: min(ends, default=len(after))].rstrip()
    return CallWriting(one[first:start], following, last, keys, between)


def _placed(written: str) -> Iterator[tuple[int, int, tuple[str, str] | None, str]]:
    """Each call's start, end, keys and what is between its name and its arguments."""
    for found in _CALL.finditer(written):
        head = _OBJECT_HEAD.search(written, 0, found.start())
        keyed = _ARGUMENTS_KEY.fullmatch(found[1])
        if head is not None and keyed is not None:
            start = head.start() + head[0].rfind("{")
            yield start, ValueEnd().find(written, start), (head[1], keyed[1]), ""
        else:
            yield found.start(), found.end(), None, found[1]
