"""Splits the growing text of a chat answer into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvserve.server.parsers.chat_format import DeltaParser
from kvserve.server.parsers.reasoning import ReasoningSplit
from kvserve.server.parsers.tool_parsers import Json, ToolSplit, call_delta, new_call


@dataclass
class NamedCall:
    """The whole text is the arguments of the one function that ``tool_choice`` names."""

    name: str
    num_calls: int = 0

    def push(self, text: str, final: bool) -> list[Json]:
        if not text:
            return []
        begun, self.num_calls = self.num_calls, 1
        return [*([] if begun else [new_call(0, self.name)]), call_delta(0, text)]


class MessageParser:
    """Makes deltas of one choice's message; ``push`` takes new text, the last with ``final``.

    Calls are looked for in the reasoning, too: the first one ends it.
    """

    def __init__(
        self, reasoning: ReasoningSplit | None, tools: ToolSplit | NamedCall | None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str, final: bool) -> list[Json]:
        if not isinstance(self._tools, ToolSplit):
            thought, text = self._split(text, final)
            named = () if self._tools is None else self._tools.push(text, final)
            return [*_thought(thought), *(_content(text) if self._tools is None else named)]
        deltas: list[Json] = []
        for delta in self._tools.push(text, final):
            if "content" in delta:
                thought, content = self._split(delta["content"], False)
            else:
                thought, content = self._split("", False, called=True)
            deltas += [*_thought(thought), *_content(content)]
            deltas += [] if "content" in delta else [delta]
        if final:
            thought, content = self._split("", True)
            deltas += [*_thought(thought), *_content(content)]
        return deltas

    def _split(self, text: str, final: bool, called: bool = False) -> tuple[str, str]:
        return ("", text) if self._reasoning is None else self._reasoning.push(text, final, called)

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` if a choice stopped by itself after a call; named calls keep ``stop``."""
        called = isinstance(self._tools, ToolSplit) and self._tools.num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason


def _thought(text: str) -> list[Json]:
    """Some clients read one name, some the other."""
    return [{"reasoning": text, "reasoning_content": text}] if text else []


def _content(text: str) -> list[Json]:
    return [{"content": text}] if text else []


class WithoutReasoning:
    """Leaves the reasoning out (``include_reasoning: false``)."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser
        self.finish_reason = parser.finish_reason

    def push(self, text: str, final: bool) -> list[Json]:
        return [delta for delta in self._parser.push(text, final) if "reasoning" not in delta]


def folded(deltas: Sequence[Json]) -> Json:
    """The message that the deltas add up to."""
    message: Json = {"role": "assistant", "content": None, "refusal": None}
    calls: list[Json] = []
    for delta in deltas:
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append(
                    {
                        "id": piece["id"],
                        "type": "function",
                        "function": {"name": "", "arguments": ""},
                    }
                )
            for name, text in piece["function"].items():
                calls[piece["index"]]["function"][name] += text
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
