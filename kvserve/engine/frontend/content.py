"""Reads what messages hold, in the parts and blocks of all APIs: text, thoughts, and what a model
of texts cannot see.

Agents send their history again with every turn, so to refuse a part of it would end the
conversation: what can be text is text, and the rest is named for the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvserve.log import RequestError

UNSEEN = "(an image or a file, which this model cannot read)"
"""Stands for what a tool has shown to a model of texts."""
_MOST_DEEP = 8
_THOUGHTS = ("thinking", "reasoning", "reasoning_content", "redacted_thinking")
_MEDIA = ("image", "file", "audio", "video", "document", "container_upload", "screenshot")


@dataclass
class Reading:
    """The content of one message."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """Types of parts that are a note in the text, or left out of it."""

    @property
    def thought(self) -> str:
        return "".join(self.thoughts)


def read_content(
    content: Any, role: str = "", param: str | None = None, place: str = ""
) -> Reading:
    """Read a text or a list of parts. ``RequestError`` for what is neither, or no part; ``place``
    begins its message.

    Of an assistant's message what its own server's tools have left is left out; elsewhere a note
    stands for what is no text.
    """
    reading = Reading()
    if content is None or isinstance(content, str):
        reading.texts = [content or ""]
    elif isinstance(content, list):
        for part in content:
            if not _read(part, role, reading):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise unread(kind, param, place)
    else:
        message = f"{place}content must be a string or a list of content parts"
        raise RequestError(message, param=param)
    return reading


def _read(part: Any, role: str, reading: Reading) -> bool:
    """Whether this is a part."""
    if isinstance(part, str):
        reading.texts.append(part)
        return True
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return False
    text = part_text(part)
    if kind in _THOUGHTS:
        if role == "assistant":
            reading.thoughts.append(thought_text(part))
    elif text is not None:
        reading.texts.append(text)
    elif kind == "text":
        return False
    else:
        reading.unseen.append(kind)
        if role != "assistant" or kind.removeprefix("input_").startswith(_MEDIA):
            reading.texts.append(UNSEEN)
    return True


def unread(kind: Any, param: str | None, place: str = "") -> RequestError:
    why = "need a text" if str(kind).endswith("text") else "are not supported; only text is"
    return RequestError(f"{place}content parts of type {kind!r} {why}", param=param)


def part_text(part: Mapping[str, Any], depth: int = 0) -> str | None:
    """The text that a part is or holds: documents, results of searches and resources have one."""
    name = part.get("tool_name")
    if part.get("type") == "tool_reference" and isinstance(name, str):
        return f"The tool {name} is loaded."
    for key in ("text", "refusal"):
        if isinstance(part.get(key), str):
            return str(part[key])
    source = part.get("source")
    if isinstance(source, Mapping):
        text = source.get("data") if source.get("type") == "text" else None
        return text if isinstance(text, str) else _within(source.get("content"), depth)
    if isinstance(part.get("resource"), Mapping):
        return part_text(part["resource"], depth + 1) if depth < _MOST_DEEP else None
    held = part.get("type") in ("document", "search_result", "compaction", "content")
    return _within(part.get("content"), depth) if held else None


def _within(content: Any, depth: int) -> str | None:
    """The text of a part's own content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or depth >= _MOST_DEEP:
        return None
    texts = [part_text(each, depth + 1) for each in content if isinstance(each, Mapping)]
    found = [text for text in texts if text is not None]
    return "\n".join(found) if found else None


def thought_text(part: Mapping[str, Any]) -> str:
    """What a part or an item of reasoning says; a summary of it is not it."""
    for key in ("thinking", "reasoning", "text", "content"):
        if isinstance(part.get(key), str):
            return str(part[key])
    pieces = part.get("content")
    pieces = pieces if isinstance(pieces, list) else ()
    return "".join(str(each.get("text", "")) for each in pieces if isinstance(each, Mapping))


class HistoryReader:
    """Reads the messages of a request one by one; ``skipped`` names what does not show as it is.

    ``answered``: the conversation has gone on for a while. Until then a user's image is refused, or
    nobody would know that it is not seen; later, that would end the conversation.
    """

    def __init__(self, field: str, answered: bool) -> None:
        self._field = field
        self._answered = answered
        self.skipped: list[str] = []

    def read(self, content: Any, at: int, role: str, param: str) -> Reading:
        place = f"{self._field}[{at}]: "
        reading = read_content(content, role, param, place)
        if reading.unseen and role == "user" and not self._answered:
            raise unread(reading.unseen[0], param, place)
        for kind in reading.unseen:
            self.skip(at, kind)
        return reading

    def skip(self, at: int, kind: str) -> None:
        self.skipped.append(f"{self._field}[{at}] ({kind})")
