"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvserve.engine.policies.base import Policy
from kvserve.scheduler.triggers.trigger import Never, Trigger


@dataclass(frozen=True)
class NoCompression(Policy):
    """Full KV cache, exact; no event is ever due."""

    name: ClassVar[str] = "none"
    cost: ClassVar[str] = "Nothing beyond the keys and values of every token."
    avoid: ClassVar[str] = "The pool holds too few sequences at their full length."

    @property
    def event_trigger(self) -> Trigger:
        return Never()
