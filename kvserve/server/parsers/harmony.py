"""Reads harmony, the format of gpt-oss: messages in channels.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``: the
channel analysis is reasoning, what goes to ``functions.NAME`` is a call, the rest is content. The
text is read and not the tokens: OpenAI's package openai-harmony reads only tokens of its own
vocabulary, needs 200 MiB for that, and gives out nothing of an answer that does not follow the
format. Of one that does, both read the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence

from kvserve.server.parsers.json_text import StrictText
from kvserve.server.parsers.reasoning import opening
from kvserve.server.parsers.tool_parsers import Json, call_delta, new_call

MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
"""Marks that end a message. The last two begin the next one: a model may forget the others."""
MARKS = (MESSAGE, "<|constrain|>", *_ENDS)
_BEGUN = re.compile(
    r"\s*(?:<\|start\|>\s*\w*)?\s*(?:to=(?P<to>[\w.-]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w*)\s*(?:to=(?P<then>[\w.-]+))?)?"
)
_HEADER = re.compile(
    r"\s*(?:<\|start\|>\s*\w*)?\s*(?:t|to|to=[\w.-]*)?\s*"
    r"(?:<\|channel\|>\s*\w*\s*(?:t|to|to=[\w.-]*)?\s*(?:<\|constrain\|>)?\s*\w*\s*)?"
)
"""A header, or its beginning."""
_CUT = re.compile(r"\s*(?:t|to|to=|json)?\s*(?:<\|constrain\|>\s*\w*)?\s*")


class HarmonyParser:
    """Makes deltas of one choice's message, as ``MessageParser`` does.

    ``tools`` are the functions that may be called. The text begins behind ``<|start|>assistant``.
    """

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = tools
        self._text = ""
        self._final = False
        self._num_calls = 0
        self._deltas = self._read()

    def push(self, text: str, final: bool) -> list[Json]:
        self._text += text
        self._final = final
        return list(iter(lambda: next(self._deltas), None))

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._num_calls and reason == "stop" else reason

    # Generators that yield None where they cannot go on without more text.

    def _read(self) -> Generator[Json | None, None, None]:
        while True:
            channel, function = yield from self._header()
            if function in self._tools:
                yield from self._call(function)
            elif channel == "analysis":
                yield from self._message(
                    lambda text: {"reasoning": text, "reasoning_content": text}
                )
            else:
                yield from self._message(lambda text: {"content": text})

    def _header(self) -> Generator[None, None, tuple[str | None, str]]:
        """The next message's channel, and the function that it calls. Text without a header, or
        with a wrong one, is a message, too."""
        while True:
            at = self._text.find(MESSAGE)
            known = self._text[: at if at >= 0 else len(self._text) - self._cut(MARKS)]
            if at >= 0 or self._final or not _HEADER.fullmatch(known):
                break
            yield None
        begun = _BEGUN.match(self._text)
        assert begun is not None
        whole = at >= 0 and _HEADER.fullmatch(known) is not None
        self._text = self._text[at + len(MESSAGE) if whole else begun.end() :]
        if at < 0 and (begun[0].strip() or "to=" in self._text) and _CUT.fullmatch(self._text):
            self._text = ""  # nothing was said yet
        to = (begun["to"] or begun["then"] or "") if whole else ""
        return begun["channel"], to.removeprefix("functions.")

    def _call(self, function: str) -> Generator[Json | None, None, None]:
        """A call is one once its arguments have begun, or its message has ended without any."""
        index, strict = self._num_calls, StrictText()
        for piece in self._message(lambda text: call_delta(index, strict.push(text))):
            if piece is not None and self._num_calls == index:
                self._num_calls += 1
                yield new_call(index, function)
            yield piece
        if self._num_calls == index:
            self._num_calls += 1
            yield new_call(index, function)
            yield call_delta(index, "{}")

    def _message(self, delta: Callable[[str], Json]) -> Generator[Json | None, None, None]:
        while True:
            found = [at for mark in _ENDS if (at := self._text.find(mark)) >= 0]
            end = min(found, default=len(self._text) - self._cut(_ENDS))
            text, self._text = self._text[:end], self._text[end:]
            if text:
                yield delta(text)
            if found:
                mark = next(mark for mark in (*_ENDS[:3], "") if self._text.startswith(mark))
                self._text = self._text[len(mark) :]
                return
            yield None

    def _cut(self, marks: Sequence[str]) -> int:
        """Characters at the end that may be the beginning of a mark."""
        return 0 if self._final else max(opening(self._text, mark) for mark in marks)


def count_reasoning(token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """Tokens of messages on the channel analysis; ``decode`` keeps special tokens."""
    texts = [decode([token]) for token in token_ids]
    count, header, inside = 0, "", False
    for text in texts:
        if text in _ENDS:
            inside, header = False, "" if text != "<|channel|>" else text
        elif text == MESSAGE:
            inside = header.startswith("<|channel|>analysis")
        elif inside:
            count += 1
        else:
            header += text
    return count
