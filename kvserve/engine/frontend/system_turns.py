"""Puts system turns where a chat template shows them.

Agents send them anywhere. Some templates refuse one that is not the first, some leave it out, some
write it under a role that their model does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
_TEXTS = ("content", "reasoning", "reasoning_content", "thinking")
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class SystemTurns:
    """Where a template shows them."""

    first: bool = True
    """At the beginning."""
    alone: bool = True
    """Without any other turn."""
    behind: frozenset[str] = frozenset(_ROLES)
    """Behind turns of these roles."""

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with each system turn where it shows.

        What the template would not show before the first answer joins the first system turn; later
        ones join the user's turn beside them, so that what was said before stays as it was.
        """
        out: list[Message] = []
        waiting: list[Message] = []
        roles = [message["role"] for message in messages]
        if not self.alone and set(roles) == {"system"}:
            return joined([{**message, "role": "user"} for message in messages])
        for at, message in enumerate(messages):
            kept = out[-1]["role"] in self.behind if out else self.first
            if message["role"] != "system" or (kept and not waiting):
                out += joined([*waiting, message]) if message["role"] == "user" else [message]
                waiting = []
            elif self.first and "assistant" not in roles[:at]:
                start = next((i for i, m in enumerate(out) if m["role"] != "system"), len(out))
                out[max(start - 1, 0) : start] = joined([*out[:start][-1:], message])
            elif next((role for role in roles[at:] if role != "system"), "") == "user":
                waiting.append({**message, "role": "user"})
            else:
                beside = [out.pop()] if out and out[-1]["role"] == "user" else []
                out += joined([*beside, {**message, "role": "user"}])
        return out


def joined(messages: Sequence[Message]) -> list[Message]:
    """Several turns of one role as one."""
    first, *rest = messages
    made = dict(first)
    for each in rest:
        for name, value in each.items():
            both = name in _TEXTS and made.get(name)
            made[name] = "\n\n".join(filter(None, (made[name], value))) if both else value
    return [made]


def find_system_turns(render: Callable[[Sequence[Message]], str]) -> SystemTurns:
    """Try a template; ``render`` gives "" where it refuses."""
    user, reply, more = _said("user", 0), _said("assistant", 1), _said("user", 2)
    function = {"name": "kvserve_tool", "arguments": "{}"}
    calls = [{"id": "call_000000000", "type": "function", "function": function}]
    call = [{"role": "assistant", "content": "", "tool_calls": calls}]
    call.append({**_said("tool", 3), "tool_call_id": "call_000000000"})
    first, late = _said("system", 4), _said("system", 5)
    text = render([first, user])
    has_role = "system" in text.split(first["content"])[0]
    # Some templates write it beside the last turn alone, if that is a user's.
    begun = [text, *filter(None, (render([first, user, *on]) for on in ([reply, more], call)))]
    shown = all(first["content"] in each and user["content"] in each for each in begun)

    def shows(before: Sequence[Message], after: Sequence[Message]) -> bool:
        text = render([*before, late, *after])
        said = [each["content"] for each in (*before, late, *after)]
        if not all(words in text for words in said):
            return False
        at, start = text.index(late["content"]), text.index(said[len(before) - 1])
        start = start if start < at and before[-1]["role"] != "system" else 0
        return (shown and has_role) or "system" not in text[start:at]

    places: dict[str, tuple[list[Message], list[list[Message]]]] = {
        "system": ([first], [[user]]),
        "user": ([user], [[], [more], [reply, more]]),
        "assistant": ([user, reply], [[], [more]]),
        "tool": ([user, *call], [[], [more], [reply, more]]),
    }
    # Some show a later one instead of the first.
    begins: list[list[Message]] = [[], [first]] if shown else [[]]
    behind = frozenset(
        role
        for role, (before, afters) in places.items()
        if all(
            shows([*begin, *before], after)
            for begin in (begins if role != "system" else [[]])
            for after in afters
        )
    )
    return SystemTurns(shown, first["content"] in render([first]), behind)


def _said(role: str, number: int) -> Message:
    return {"role": role, "content": f"kvserve words {number}"}
