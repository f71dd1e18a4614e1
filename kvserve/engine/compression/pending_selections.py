"""Results of observed events, kept on the device until the events are carried out."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class PendingSelections(Generic[T]):
    """Results by sequence. An event is carried out once its counts are on the host: in the next
    step or, if steps overlap, the one after. Results that are not taken by then are dropped, and
    the event is observed again.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._steps: deque[dict[int, T]] = deque(maxlen=2 if overlaps else 1)

    def take(self) -> dict[int, T]:
        """The results of all events that may be carried out in the step that begins now."""
        found = {seq_id: each for step in self._steps for seq_id, each in step.items()}
        self._steps.append({})
        return found

    def add(self, found: Mapping[int, T]) -> None:
        """Add results of the step that has begun."""
        self._steps[-1].update(found)
