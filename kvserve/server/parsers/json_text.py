"""Finds the end of values in JSON text that is still growing, and reads complete objects."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

_MARKS = {
    '"': re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL),
    "\"'": re.compile(r"\\(?:.|\Z)|[\"'(){}\[\]]", re.DOTALL),
}
_SPACE = re.compile(r"[ \n\r\t]*")
_CONTROL = re.compile(r'\\(?:.|\Z)|"|[\x00-\x1f]', re.DOTALL)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON's")
    return value


# Models write line breaks into strings.
_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_constant=_number)


class ValueEnd:
    """Looks for the end of a bracketed value in pieces of text; each character is read once.

    ``quotes`` are those of strings: those of JSON, or also Python's, which has ``()`` too.
    """

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._depth = depth
        self._marks = _MARKS[quotes]
        self._quote = ""
        self._escaped = False

    def find(self, text: str, start: int = 0) -> int:
        """Where the value ends in ``text``, which goes on from ``start``; -1: not in it."""
        if self._escaped and start < len(text):
            start, self._escaped = start + 1, False
        for found in self._marks.finditer(text, start):
            mark = found[0]
            if mark[0] == "\\":
                self._escaped = len(mark) == 1
            elif self._quote or mark in "\"'":
                if not self._quote:
                    self._quote = mark
                elif mark == self._quote:
                    self._quote = ""
            elif mark in "({[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return found.end()
        return -1


class StrictText:
    """Escapes control characters in the strings of JSON text that comes in pieces: models write
    line breaks there, which clients' parsers refuse."""

    def __init__(self) -> None:
        self._quoted = self._escaped = False

    def push(self, text: str) -> str:
        if self._escaped and text:
            self._escaped = False
            return text[0] + self.push(text[1:])
        return _CONTROL.sub(self._written, text)

    def _written(self, found: re.Match[str]) -> str:
        mark = found[0]
        if mark[0] == "\\":
            self._escaped = len(mark) == 1
        elif mark == '"':
            self._quoted = not self._quoted
        elif self._quoted:
            return json.dumps(mark)[1:-1]
        return mark


def raw_members(text: str) -> dict[str, str] | None:
    """The members of a JSON object, each value as it is written; ``None`` if it is no object."""
    members: dict[str, str] = {}
    at = _behind(text, 1)
    try:
        while text[at] != "}":
            name, at = _DECODER.raw_decode(text, at)
            at = _behind(text, at)
            if not isinstance(name, str) or text[at] != ":":
                return None
            start = _behind(text, at + 1)
            _, end = _DECODER.raw_decode(text, start)
            members[name] = text[start:end]
            at = _behind(text, end)
            if text[at] == ",":
                at = _behind(text, at + 1)
            elif text[at] != "}":
                return None
    except (ValueError, IndexError, RecursionError):
        return None
    return members


def read_json(text: str) -> object:
    """A JSON value, or ``None`` if the text is none (or nested too deeply to be read)."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def read_object(text: str) -> dict[str, Any]:
    """A JSON object; what there is of it if the text was cut."""
    value = read_json(text)
    if value is None and text:
        with suppress(ValueError):
            value = from_json(text, allow_partial="trailing-strings")
    return value if isinstance(value, dict) else {}


def write_json(value: object) -> str:
    """JSON text, in which a lone surrogate stays an escape: no answer could hold it. ``ValueError``
    for numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or whole_text(text) == text else json.dumps(value)


def whole_text(text: str) -> str:
    """The text without lone surrogates, which no tokenizer and no answer takes."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _behind(text: str, at: int) -> int:
    """Behind the white space that begins there."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
