"""Finds calls in XML, in text that is still growing.

``<function=name>`` around ``<parameter=key>`` (Qwen3-Coder), ``<invoke name="name">`` around
``<parameter name="key">`` (MiniMax), or a name before ``<arg_key>`` (GLM).
A value may hold the letters of any mark: one that ends it is followed by what may come behind a
value, and has a line of its own where the value began on one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from kvserve.server.parsers.reasoning import opening


@dataclass(frozen=True)
class XmlForm:
    """``head`` begins a call and ``key`` an argument; ``end`` ends its value, ``close`` the call.
    ``outer`` may stand behind a call, or instead of ``close``."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    begins: str
    end: str
    close: str
    outer: tuple[str, ...]

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """What may end a value."""
        return re.compile("|".join(map(re.escape, (self.end, self.begins, self.close))))


FUNCTION = XmlForm(
    re.compile(r"<function=(?P<name>[\w.-]{1,128})>"),
    re.compile(r"<parameter=(?P<key>[^>\s]+)>"),
    "<parameter=",
    "</parameter>",
    "</function>",
    ("</tool_call>", "<tool_call>", "<function=", "</seed:tool_call>", "</tool_calls>"),
)
_AROUND = ("</minimax:tool_call>", "</｜DSML｜tool_calls>", "</｜DSML｜function_calls>")


def _named(call: str, key: str) -> XmlForm:
    return XmlForm(
        re.compile(rf'<{call} name="(?P<name>[\w.-]{{1,128}})">'),
        re.compile(rf'<{key} name="(?P<key>[^">]+)"[^>]*>'),
        f'<{key} name="',
        f"</{key}>",
        f"</{call}>",
        (f'<{call} name="', *_AROUND),
    )


INVOKE = _named("invoke", "parameter")
DSML = _named("｜DSML｜invoke", "｜DSML｜parameter")
PARAM = _named("function", "param")
"""Those of MiniMax, DeepSeek V3.2 and MiniCPM5."""
KEYS = XmlForm(
    re.compile(r"(?P<name>[\w.-]{1,128})\s*(?:<tool_sep>\s*)?(?=<arg_key>|</tool_call>)"),
    re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    "<arg_key>",
    "</arg_value>",
    "</tool_call>",
    ("</tool_call>", "<tool_call>"),
)
_KEY_MOST = 512
"""Characters of a mark with its name."""
_BEGUN_NAME = re.compile(
    r'(?:<[a-z_|｜DSML]{0,16}(?:=| (?:n|na|nam|name|name=|name=")?)?)?'
    r'[\w.-]{0,128}"?\s*(?:<tool_sep>\s*)?<?[a-z_/]{0,10}>?'
)
"""What may still become the beginning of a call."""


class XmlCall:
    """Reads one call at ``at``; each character of a value is looked at once.

    ``names`` are the arguments that its tool knows: only they begin where the one before them was
    not ended. ``pairs`` are its arguments as they are written.
    """

    def __init__(self, form: XmlForm, at: int) -> None:
        self.name = ""
        self.pairs: dict[str, str] = {}
        self._form = form
        self._at = at
        self._key: str | None = None
        self._seen = at
        self._maybe: int | None = None
        """The first mark that ends the value if no better one comes."""

    def find_name(self, text: str) -> bool | None:
        """Whether a call begins; ``None``: it may, once there is more text."""
        head = self._form.head.match(text, self._at)
        if head is None:
            return None if _BEGUN_NAME.fullmatch(text, self._at) else False
        self.name, self._at = head["name"], head.end()
        return True

    def find_end(self, text: str, final: bool, names: Collection[str]) -> int | None:
        """Where the call ends; ``None``: further on; -1: this is no call."""
        form = self._form
        while True:
            if self._key is not None:
                if not self._end_value(text, final, names):
                    return None
                continue
            at = _behind_space(text, self._at)
            begun = form.key.match(text, at)
            if begun is not None:
                self._key, self._at, self._seen = begun["key"], begun.end(), begun.end()
                continue
            if text.startswith(form.close, at) and form.close not in form.outer:
                return at + len(form.close)
            if text.startswith(form.outer, at):
                return at
            rest = text[at : at + _KEY_MOST]
            cut = rest.startswith(form.begins) and len(rest) < _KEY_MOST
            return None if cut or _begins(rest, (form.begins, form.close, *form.outer)) else -1

    def _end_value(self, text: str, final: bool, names: Collection[str]) -> bool:
        """Look for the end of the open value, and take the value."""
        form = self._form
        for found in form.marks.finditer(text, self._seen):
            ends = self._ends(text, found[0], found.start(), final, names)
            if ends is None:
                self._seen = found.start()
                return False
            if ends:
                self._take_value(text, found.start())
                return True
        if final and self._maybe is not None:
            self._take_value(text, self._maybe)
            return True
        longest = max(opening(text, mark) for mark in (form.end, form.begins, form.close))
        self._seen = max(self._seen, len(text) - longest)
        return False

    def _take_value(self, text: str, end: int) -> None:
        assert self._key is not None
        value = text[self._at : end]
        if value.startswith("\n"):
            value = value[1:]
            line = value.rfind("\n")
            value = value[:line] if line >= 0 and not value[line:].strip() else value
        else:
            value = value.removesuffix("\n")
        self.pairs[self._key] = value
        self._key, self._maybe = None, None
        self._at = end + (len(self._form.end) if text.startswith(self._form.end, end) else 0)

    def _ends(
        self, text: str, mark: str, at: int, final: bool, names: Collection[str]
    ) -> bool | None:
        """Whether a mark in a value ends it; ``None``: that depends on what follows."""
        form, lines = self._form, text.startswith("\n", self._at)
        own_line = not text[text.rfind("\n", 0, at) + 1 : at].strip()
        if mark == form.begins:  # the end was forgotten
            key = form.key.match(text, at)
            if key is not None:
                new = key["key"] != self._key and key["key"] not in self.pairs
                return new and (own_line or not lines) and (not names or key["key"] in names)
            return None if not final and len(text) - at < _KEY_MOST else False
        behind = _behind_space(text, at + len(mark))
        rest = text[behind : behind + _KEY_MOST]
        if mark == form.close:  # the end was forgotten
            ended = self._follows(rest, form.outer, final)
            return ended if own_line or not lines else False
        ended = self._follows(rest, (form.begins, form.close, *form.outer), final)
        if not ended or (lines and (own_line or "\n" in text[at:behind])):
            return ended
        if not lines:
            # The close behind it may be part of the value, too.
            if not rest.startswith(form.close) or form.close in form.outer:
                return True
            after = rest[len(form.close) :].lstrip()
            ended = self._follows(after, form.outer, final)
        if ended is not True and self._maybe is None:
            self._maybe = at
        return ended if not lines else False

    def _follows(self, rest: str, marks: tuple[str, ...], final: bool) -> bool | None:
        """Whether one of the marks comes next; ``None``: it may."""
        if rest.startswith(marks) or (final and not rest):
            return True
        return None if not final and _begins(rest, marks) else False


def _begins(rest: str, marks: tuple[str, ...]) -> bool:
    """Whether this may become one of the marks."""
    return any(mark.startswith(rest) for mark in marks)


_SPACE = re.compile(r"\s*")


def _behind_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
