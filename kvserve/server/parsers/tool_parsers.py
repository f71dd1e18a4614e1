"""Separates tool calls from the content of a model's text while it streams.

In all formats a call is a JSON object with a name and arguments; ``mistral`` may also write the
name before its arguments. Formats differ in the marks around calls. Arguments are passed on
character for character as they arrive.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvserve.server.parsers.reasoning import opening

Json = dict[str, Any]


@dataclass(frozen=True)
class ToolSyntax:
    """How a model writes a list of calls.

    ``opens`` begins a list and ``closes`` ends it. With ``at_start``, content that starts with
    ``{`` or ``[`` is a list too; that is the only way if ``opens`` is empty. ``skipped`` characters
    may come between calls. ``named`` allows ``name{arguments}`` in place of an object. ``special``:
    the marks are special tokens.
    """

    opens: str
    closes: str = ""
    skipped: str = " \n\r\t"
    named: bool = False
    special: bool = False
    at_start: bool = False
    id_length: int = 24


PARSERS = {
    "hermes": ToolSyntax("<tool_call>", "</tool_call>"),
    "llama3_json": ToolSyntax("<|python_tag|>", skipped=" \n\r\t;,", special=True, at_start=True),
    "mistral": ToolSyntax(
        "[TOOL_CALLS]", skipped=" \n\r\t[],", named=True, special=True, id_length=9
    ),
    "internlm": ToolSyntax("<|action_start|><|plugin|>", "<|action_end|>", special=True),
}
REQUIRED = ToolSyntax("", skipped=" \n\r\t[],", at_start=True)
"""The form of calls under ``tool_choice: required``, for every model: a grammar forces it."""

_ARGS = "[ARGS]"


@dataclass
class ToolSplit:
    """Splits one choice's text into content and deltas of ``tool_calls``."""

    syntax: ToolSyntax
    parallel: bool = True
    num_calls: int = 0
    _held: str = ""
    _listing: bool = False
    _started: bool = False
    _since_open: str = ""
    _call: _Call | None = None

    def push(self, text: str, final: bool) -> list[Json]:
        """Deltas (``content`` or ``tool_calls``) for new text."""
        self._held += text
        deltas: list[Json] = []
        while True:
            before = self._held, self._listing, self._call
            deltas += self._step(final)
            if before == (self._held, self._listing, self._call):
                return _merged(deltas)

    def _step(self, final: bool) -> Iterator[Json]:
        if self._call is not None:
            yield from self._in_call()
        elif self._listing:
            yield from self._between_calls(final)
        else:
            yield from self._in_content(final)

    def _in_content(self, final: bool) -> Iterator[Json]:
        opens, text = self.syntax.opens, self._held
        if not self._started and self.syntax.at_start:
            stripped = text.lstrip()
            if not stripped:
                return
            if stripped[0] in "{[":
                self._started = self._listing = True
                return
        at = text.find(opens) if opens else -1
        if at >= 0:
            self._listing, self._since_open = True, opens
            self._held, text = text[at + len(opens) :], text[:at]
        else:
            keep = 0 if final else opening(text, opens)
            self._held, text = text[len(text) - keep :], text[: len(text) - keep]
        if not self._started and self.num_calls:
            text = text.lstrip()  # drop the space after a call
        if text:
            self._started = True
            yield {"content": text}

    def _between_calls(self, final: bool) -> Iterator[Json]:
        syntax = self.syntax
        marks = [mark for mark in (syntax.opens, syntax.closes) if mark]
        rest = self._skip(" \n\r\t")
        if not rest or (
            not final and any(mark.startswith(rest) and mark != rest for mark in marks)
        ):
            return
        if syntax.closes and rest.startswith(syntax.closes):
            self._listing = self._started = False
            self._since_open, self._held = "", rest[len(syntax.closes) :]
            return
        if syntax.opens and rest.startswith(syntax.opens):
            self._held = rest[len(syntax.opens) :]
            return
        rest = self._skip(syntax.skipped)
        if rest.startswith("{"):
            self._call = _Call()
        elif syntax.named and rest and (rest[0].isalnum() or rest[0] == "_"):
            yield from self._named_call(final)
        elif rest:
            yield from self._give_up()

    def _skip(self, characters: str) -> str:
        rest = self._held.lstrip(characters)
        self._since_open += self._held[: len(self._held) - len(rest)]
        self._held = rest
        return rest

    def _named_call(self, final: bool) -> Iterator[Json]:
        """``name{...}`` or ``name[ARGS]{...}``."""
        head, brace, rest = self._held.partition("{")
        if brace:
            self._call = _Call(name=head.removesuffix(_ARGS).strip(), in_arguments=True)
            self._held = brace + rest
        elif final:
            yield from self._give_up()

    def _in_call(self) -> Iterator[Json]:
        call = self._call
        assert call is not None
        used, arguments = call.scan(self._held)
        self._since_open += self._held[:used]
        self._held = self._held[used:]
        if call.name and not call.announced and (self.parallel or not self.num_calls):
            call.announced, call.index = True, self.num_calls
            self.num_calls += 1
            arguments = call.waiting + arguments
            function = {"name": call.name, "arguments": ""}
            yield _delta(
                {
                    "index": call.index,
                    "id": _call_id(self.syntax.id_length),
                    "type": "function",
                    "function": function,
                }
            )
        elif not call.announced:
            call.waiting += arguments
        if call.announced and arguments:
            yield _delta({"index": call.index, "function": {"arguments": arguments}})
        if call.complete:
            self._call = None
            if call.name:
                self._since_open = ""
            else:
                yield from self._give_up()

    def _give_up(self) -> Iterator[Json]:
        """The text that was held back is not a call: give it out as content."""
        self._listing, self._started = False, True
        yield {"content": self._since_open + self._held}
        self._held = self._since_open = ""


@dataclass
class _Call:
    """Scans one call's JSON: finds the name, and passes the arguments on."""

    name: str = ""
    in_arguments: bool = False
    """The text is the arguments alone; the name is known."""
    announced: bool = False
    index: int = 0
    waiting: str = ""
    complete: bool = False
    _depth: int = 0
    _string: str | None = None
    _escaped: bool = False
    _key: str = ""
    _value: bool = False

    def scan(self, text: str) -> tuple[int, str]:
        """The number of characters read, up to the object's end, and those that are arguments."""
        arguments = []
        for used, char in enumerate(text, 1):
            outside = self._depth == 1 and self._string is None and (char in ",}" or char.isspace())
            value = self._value and self._key in ("arguments", "parameters")
            if self.in_arguments or (value and not outside):
                arguments.append(char)
            self._read(char)
            if self._depth == 0:
                self.complete = True
                return used, "".join(arguments)
        return len(text), "".join(arguments)

    def _read(self, char: str) -> None:
        if self._string is not None:
            self._read_string(char)
        elif char == '"':
            self._string = ""
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif self._depth == 1 and char == ":":
            self._value = True
        elif self._depth == 1 and char == ",":
            self._value = False

    def _read_string(self, char: str) -> None:
        assert self._string is not None
        if char == '"' and not self._escaped:
            self._end_string(self._string)
            self._string = None
            return
        self._string += char
        self._escaped = char == "\\" and not self._escaped

    def _end_string(self, raw: str) -> None:
        if self._depth != 1 or self.in_arguments:
            return
        if not self._value:
            self._key = raw
        elif self._key == "name":
            self.name = str(json.loads(f'"{raw}"'))


def _delta(call: Json) -> Json:
    return {"tool_calls": [call]}


def _merged(deltas: list[Json]) -> list[Json]:
    """Join neighbouring pieces of content."""
    out: list[Json] = []
    for delta in deltas:
        if "content" in delta and out and "content" in out[-1]:
            out[-1]["content"] += delta["content"]
        else:
            out.append(delta)
    return out


def _call_id(length: int) -> str:
    text = secrets.token_hex(length)[:length]
    return text if length == 9 else f"call_{text}"
