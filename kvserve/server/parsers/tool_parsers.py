"""Separates tool calls from the content of a model's text while it streams.

Text is held back from a call's first mark on until the call is certain: its name is a tool's, and
its arguments have begun. Then they are passed on as they arrive, character for character. What
turns out to be no call, or ends before it is certain, is content.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any

from kvserve.server.parsers.argument_types import ArgumentTypes
from kvserve.server.parsers.json_text import (
    StrictText,
    ValueEnd,
    raw_members,
    read_json,
    whole_text,
    write_json,
)
from kvserve.server.parsers.literal_calls import escaped_call, python_calls
from kvserve.server.parsers.reasoning import CLOSE, opening
from kvserve.server.parsers.tool_formats import ToolFormat
from kvserve.server.parsers.xml_calls import DSML, FUNCTION, INVOKE, KEYS, PARAM, XmlCall, XmlForm

Json = dict[str, Any]
_Deltas = Generator[Json | None, None, None]
_Found = Generator[Json | None, None, bool]

_HEAD_MOST = 1024
"""Characters in which a call's name and the beginning of its arguments must come to stream."""
_MOST_WRONG = 64
"""Marks without a call behind them after which no call is looked for: each may have been followed
to the end of the text."""
_ARGUMENTS = ("arguments", "parameters")
_STRING = r'"(?P<{}>[^"\\]*)"'
_BEFORE = r'\{\s*(?:"(?:type|id|index|tool_call_id)"\s*:\s*(?:"[^"\\]*"|\d+)\s*,\s*)*'
_NAMED = re.compile(_BEFORE + r'"(?:tool_)?name"\s*:\s*' + _STRING.format("name"))
_HEAD = re.compile(_NAMED.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r"\{\s*(?:" + _STRING.format("key") + r'|(?P<other>[^"\s}]))')
_KEYS = {*_ARGUMENTS, "name", "tool_name", "type", "id", "index", "function", "tool_call_id"}
_PYTHON_LIST = re.compile(r"\[\s*(?:[A-Za-z_]|\Z)")
_PYTHON_CALL = re.compile(r"(?P<name>[\w.-]{1,128})(?:(?P<open>\()|\Z)")
_BARE = re.compile(r"(?<![\w.-])(?P<name>[\w.-]{1,128})\s{0,8}(?=<arg_key>)")
_BARE_BEGUN = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]{1,128})(?P<rest>\s{0,8}(?:<[arg_key]{0,7})?)\Z"
)
"""GLM's call without the mark before it, and the text that may become one."""
_BARE_MOST = 150
"""Characters in which such a call, or a mark with a name, shows what it is."""


class ToolSplit:
    """Splits one choice's text into content and deltas of ``tool_calls``.

    ``tools`` are the schemas of the parameters of the tools that may be called, by name; ``None``:
    any name is a tool's. Only the first call is passed on unless ``parallel``. ``inside``: the text
    begins as reasoning, up to ``CLOSE``, or (``None``) does so if it opens itself. A mark opens a
    call there, too; calls without a mark begin behind it.
    """

    def __init__(
        self,
        syntax: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: bool = True,
        inside: bool | None = False,
    ) -> None:
        self.num_calls = 0
        self._syntax = syntax
        self._tools = tools
        self._parallel = parallel
        self._text = ""
        """What has not been given out."""
        self._final = False
        self._begun = inside is True
        """Whether there was content since the beginning, or since the last calls."""
        self._close = "" if inside is False else CLOSE
        self._wrong = 0
        self._in_word = False
        """Whether what was given out ends within a word."""
        self._deltas = self._read()

    def push(self, text: str, final: bool) -> list[Json]:
        """Deltas (``content`` or ``tool_calls``) for new text."""
        self._text += text
        self._final = final
        return _merged(list(iter(lambda: next(self._deltas), None)))

    # ---- what stands around calls ---------------------------------------------------------------
    # These generators yield deltas, and None where they cannot go on without more text.

    def _read(self) -> _Deltas:
        while True:
            opened = yield from self._content()
            yield from self._calls(opened)

    def _content(self) -> Generator[Json | None, None, int]:
        """Give out content up to where calls may begin; returns the length of their mark."""
        syntax = self._syntax
        while True:
            text = self._text
            if syntax.at_start and not self._begun and not self.num_calls:
                first = text.lstrip()[:1]
                if first and first in syntax.at_start:
                    return 0
                if not first and not self._final:
                    yield None
                    continue
            heads = () if self._tools is None else syntax.heads
            opens = (*syntax.opens, *heads) if self._wrong < _MOST_WRONG else ()
            marks = (*opens, self._close) if self._close else opens
            found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
            found += [(at, "") for at in self._bare_calls()]
            end, mark = min(found, default=(len(text), ""))
            if not found and not self._final:
                held = max((opening(text, mark) for mark in marks), default=0)
                end -= max(held, self._bare_begun())
            if mark and mark == self._close:
                yield from self._give(end + len(mark))
                self._close, self._begun = "", False
                continue
            yield from self._give(end)
            if found:
                return 0 if mark in heads else len(mark)
            yield None

    @property
    def _bare_tools(self) -> Collection[str]:
        """Tools whose calls may begin without a mark, as GLM's."""
        may = "keys" in self._syntax.calls and self._wrong < _MOST_WRONG
        return self._tools or () if may else ()

    def _bare_calls(self) -> Iterator[int]:
        """Where calls begin without their mark."""
        tools = self._bare_tools
        for found in _BARE.finditer(self._text) if tools and "<arg_key>" in self._text else ():
            if found["name"] in tools and (found.start() or not self._in_word):
                yield found.start()

    def _bare_begun(self) -> int:
        """Characters at the end that may become such a call."""
        tools = self._bare_tools
        found = _BARE_BEGUN.search(self._text[-_BARE_MOST:]) if tools else None
        if found is None or (self._in_word and len(found[0]) == len(self._text)):
            return 0
        name, whole = found["name"], bool(found["rest"])
        begun = name in tools if whole else any(tool.startswith(name) for tool in tools)
        return len(found[0]) if begun else 0

    def _calls(self, at: int) -> _Deltas:
        """Read calls, the first of which may begin at ``at``; before it stands their mark."""
        syntax, opened, called = self._syntax, at, False
        while True:
            at = self._skip(at)
            if called and not opened:  # what stands between calls is no content
                self._take(at)
                at, self._begun = 0, False
            rest = self._text[at:]
            closed = next((mark for mark in syntax.closes if rest.startswith(mark)), None)
            if closed is not None and called and not opened:
                self._take(len(closed))
                yield from self._closes()
                return
            again = next((mark for mark in syntax.opens if rest.startswith(mark)), None)
            if again is not None:
                at += len(again)
                opened = at  # no call comes of the marks before this one
                continue
            begun = not rest or any(m != rest and m.startswith(rest) for m in syntax.all_marks)
            if begun and not (self._final and self._text):
                yield None  # nothing, or the beginning of a mark
                continue
            for kind in syntax.calls:
                if (yield from _READERS[kind](self, at)):
                    at, opened, called = 0, 0, True
                    break
            else:
                # It is content, with the mark before it; another mark may come behind that.
                self._wrong += 1
                yield from self._give(opened or min(at + 1, len(self._text)))
                return

    def _closes(self) -> _Deltas:
        """Take the marks that end what is around the calls."""
        while True:
            rest = self._text.lstrip()
            closed = next((mark for mark in self._syntax.closes if rest.startswith(mark)), "")
            if closed:
                self._take(len(self._text) - len(rest) + len(closed))
            elif self._final or not any(mark.startswith(rest) for mark in self._syntax.closes):
                return
            else:
                yield None

    def _skip(self, at: int) -> int:
        """Behind what may stand between calls, up to a mark or what may become one."""
        text, syntax = self._text, self._syntax
        while at < len(text):
            passed = next((mark for mark in syntax.marks if text.startswith(mark, at)), None)
            if passed is None:
                stop = any(mark.startswith(text[at : at + len(mark)]) for mark in syntax.all_marks)
                if stop or text[at] not in syntax.between:
                    break
            at += len(passed or "1")
        return at

    def _give(self, end: int) -> Iterator[Json]:
        """Give out the next ``end`` characters as content."""
        text = self._take(end)
        if not self._begun and self.num_calls:
            text = text.lstrip()  # drop the space after a call
        if text:
            self._begun = True
            self._in_word = _BARE_BEGUN.search(text[-1]) is not None
            yield {"content": text}

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        return taken

    # ---- one call -------------------------------------------------------------------------------
    # Each reads the call at ``at``, and returns whether there is one.

    def _object(self, at: int) -> _Found:
        """A JSON object with a name and arguments, in any order and among other members."""
        end = ValueEnd()
        seen = at
        while True:
            text = self._text
            if not text.startswith("{", at):
                return False
            if len(text) - at < _HEAD_MOST or seen == at:
                head = _HEAD.match(text, at, at + _HEAD_MOST)
                if head is not None and self._is_tool(head["name"]):
                    yield from self._streamed(head["name"], head.end())
                    yield from self._rest_of_object()
                    return True
                if self._hopeless(at):
                    return False
            stop, seen = end.find(text, seen), len(text)
            if stop >= 0:
                call = self._call_in(raw_members(text[at:stop]))
                if call is None:
                    return False
                self._take(stop)
                yield from self._whole(*call)
                return True
            if self._final:
                return False
            yield None

    def _hopeless(self, at: int) -> bool:
        """Whether an object that begins there can be no call, whatever follows."""
        key, named = _FIRST_KEY.match(self._text, at), _NAMED.match(self._text, at)
        if named is not None and not self._is_tool(named["name"]):
            return True
        is_name = key is not None and self._tools is not None and key["key"] in self._tools
        return key is not None and key["key"] not in _KEYS and not is_name  # None: no string

    def _call_in(self, members: Mapping[str, str] | None) -> tuple[str, str] | None:
        """The name and the arguments of a call, if that is what the object is."""
        if members is None:
            return None
        if members.get("function", "").startswith("{"):
            return self._call_in(raw_members(members["function"]))
        if len(members) == 1 and self._tools is not None and next(iter(members)) in self._tools:
            [call] = members.items()  # as Apertus writes it
            return call if call[1].startswith("{") else None
        name = read_json(members.get("name", members.get("tool_name", "")))
        if not isinstance(name, str) or not self._is_tool(name):
            return None
        found = [members[key] for key in _ARGUMENTS if key in members]
        if not found:
            # Without marks it may be an answer that has a name.
            return (name, "{}") if self._syntax.opens and not self._syntax.at_start else None
        if found[0].startswith('"'):  # JSON text in a string
            found[0] = whole_text(str(read_json(found[0])))
        arguments = "{}" if found[0] in ("null", "") else found[0]
        return (name, arguments) if isinstance(read_json(arguments), dict) else None

    def _rest_of_object(self) -> _Deltas:
        """Skip the call's last members and its bracket; models forget it now and then."""
        while not (rest := self._text.lstrip()):
            if self._final:
                return
            yield None
        if rest[0] not in ",}":
            return
        end, seen = ValueEnd(depth=1), 0
        while (stop := end.find(self._text, seen)) < 0:
            if self._final:
                return
            seen = len(self._text)
            yield None
        self._take(stop)

    def _name_first(self, at: int) -> _Found:
        """A name, and its arguments as a JSON object."""
        assert self._syntax.named is not None
        heads = self._syntax.heads
        while True:
            begin = self._text[at : at + _BARE_MOST]
            if heads and not any(begin.startswith(h) or h.startswith(begin) for h in heads):
                return False
            head = self._syntax.named.match(self._text, at)
            if head is not None:
                if self._is_tool(head["name"]):
                    yield from self._streamed(head["name"], head.end())
                    return True
                return False
            if self._final or len(self._text) - at > _HEAD_MOST:
                return False
            yield None

    def _element(self, at: int, form: XmlForm) -> _Found:
        """A call in XML, all of it at once: its arguments must become JSON."""
        call, end = XmlCall(form, at), None
        types = ArgumentTypes({})
        while True:
            if not call.name:
                begun = call.find_name(self._text)
                if begun is False or (begun and not self._is_tool(call.name)):
                    return False
                types = ArgumentTypes((self._tools or {}).get(call.name, {}))
            if call.name:
                end = call.find_end(self._text, self._final, types.names)
            if end is not None:
                break
            if self._final:
                return False
            yield None
        if end < 0:
            return False
        arguments = {key: types.read(key, text) for key, text in call.pairs.items()}
        self._take(end)
        yield from self._whole(call.name, write_json(arguments))
        return True

    def _python(self, at: int, listed: bool = True) -> _Found:
        """Calls as a list in Python's syntax, ``[f(a=1), g(b="x")]``, or one of them."""
        end, seen = ValueEnd(quotes="\"'"), at
        while True:
            begun = (_PYTHON_LIST if listed else _PYTHON_CALL).match(self._text, at)
            if begun is None or not (listed or not begun["open"] or self._is_tool(begun["name"])):
                return False
            stop, seen = end.find(self._text, seen), len(self._text)
            if stop >= 0:
                break
            if self._final:
                return False
            yield None
        calls = python_calls(self._text[at:stop] if listed else f"[{self._text[at:stop]}]")
        if not calls or not all(self._is_tool(name) for name, _ in calls):
            return False
        self._take(stop)
        for name, arguments in calls:
            yield from self._whole(name, arguments)
        return True

    def _escaped(self, at: int) -> _Found:
        """Gemma's ``call:f{a:<escape>text<escape>,b:1}``, up to the mark that ends it."""
        while True:
            if not "call:".startswith(self._text[at : at + 5]):
                return False
            ends = [e for mark in self._syntax.closes if (e := self._text.find(mark, at)) >= 0]
            if ends or self._final:
                break
            yield None
        end = min(ends, default=len(self._text))
        call = escaped_call(self._text[at:end])
        if call is None or not self._is_tool(call[0]):
            return False
        self._take(end)
        yield from self._whole(*call)
        return True

    def _is_tool(self, name: str) -> bool:
        return bool(name) and (self._tools is None or name in self._tools)

    def _whole(self, name: str, arguments: str) -> Iterator[Json]:
        if call := self._announced(name):
            yield call
            yield call_delta(self.num_calls - 1, StrictText().push(arguments))

    def _streamed(self, name: str, start: int) -> _Deltas:
        """Pass on the arguments that begin at ``start``, as they come."""
        self._take(start)
        shown = self._announced(name)
        if shown:
            yield shown
        end, strict = ValueEnd(), StrictText()
        while True:
            stop = end.find(self._text)
            piece = strict.push(self._take(stop if stop >= 0 else len(self._text)))
            if piece and shown:
                yield call_delta(self.num_calls - 1, piece)
            if stop >= 0:
                return
            yield None

    def _announced(self, name: str) -> Json | None:
        """The delta that begins a call; ``None`` if it is one too many."""
        if self.num_calls and not self._parallel:
            return None
        self.num_calls += 1
        return new_call(self.num_calls - 1, name, self._syntax.id_length)


_READERS: dict[str, Callable[[ToolSplit, int], _Found]] = {
    "object": ToolSplit._object,
    "named": ToolSplit._name_first,
    "function": lambda self, at: self._element(at, FUNCTION),
    "invoke": lambda self, at: self._element(at, INVOKE),
    "dsml": lambda self, at: self._element(at, DSML),
    "param": lambda self, at: self._element(at, PARAM),
    "keys": lambda self, at: self._element(at, KEYS),
    "python": ToolSplit._python,
    "python call": lambda self, at: self._python(at, listed=False),
    "escaped": ToolSplit._escaped,
}


def new_call(index: int, name: str, id_length: int = 24) -> Json:
    """The delta that begins a call; Mistral's templates want ids of nine characters."""
    text = secrets.token_hex(id_length)[:id_length]
    function = {"name": name, "arguments": ""}
    call_id = text if id_length == 9 else f"call_{text}"
    return {
        "tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]
    }


def call_delta(index: int, arguments: str) -> Json:
    return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}


def _merged(deltas: list[Json]) -> list[Json]:
    """Join neighbouring pieces of content."""
    out: list[Json] = []
    for delta in deltas:
        if "content" in delta and out and "content" in out[-1]:
            out[-1]["content"] += delta["content"]
        else:
            out.append(delta)
    return out
