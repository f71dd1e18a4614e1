"""Finds the end of values in JSON text that is still growing, and reads complete objects."""

from __future__ import annotations

import json
import re

_MARKS = {
    '"': re.compile(r'\\(?:.|\Z)|["{}\[\]]', re.DOTALL),
    "\"'": re.compile(r"\\(?:.|\Z)|[\"'(){}\[\]]", re.DOTALL),
}
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings
_SPACE = re.compile(r"[ \n\r\t]*")


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


def _behind(text: str, at: int) -> int:
    """Behind the white space that begins there."""
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
