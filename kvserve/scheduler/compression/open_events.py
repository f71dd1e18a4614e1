"""Open events: a step scores them, or has scored them, and they are not scheduled yet.

Only events whose lengths depend on their scores are ever open. All others are scored as they are
carried out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvserve.scheduler.messages.event import Scores
from kvserve.scheduler.messages.output import ObservationTask


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """An event being scored; once its step has come back, it is number ``place`` in ``scores``.

    ``query_start``, the position of its first query, identifies it: a sequence that is preempted in
    the step that scores its event may be due for another event when the scores arrive.
    """

    query_start: int
    scores: Scores | None = None
    place: int = 0


class OpenEvents:
    """Open events by sequence."""

    def __init__(self) -> None:
        self._open: dict[int, OpenEvent] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def scoring(self) -> bool:
        """Whether any event waits for its scores."""
        return any(event.scores is None for event in self._open.values())

    def is_scoring(self, seq_id: int) -> bool:
        """Whether a sequence's event waits for its scores."""
        return seq_id in self._open and self._open[seq_id].scores is None

    def scored(self, seq_id: int, query_start: int) -> OpenEvent | None:
        """A sequence's event with its scores, if those scores are of this event."""
        event = self._open.get(seq_id)
        if event is None or event.scores is None or event.query_start != query_start:
            return None
        return event

    def start_scoring(self, task: ObservationTask) -> None:
        """The step that is being scheduled scores them."""
        for seq_id, query_start in _events(task):
            assert seq_id not in self._open
            self._open[seq_id] = OpenEvent(query_start)

    def take_scores(self, task: ObservationTask, scores: Scores) -> None:
        """A step has come back with its answer."""
        for place, (seq_id, query_start) in enumerate(_events(task)):
            assert self.is_scoring(seq_id)
            self._open[seq_id] = OpenEvent(query_start, scores, place)

    def close_scored(self) -> None:
        """The scored events are scheduled in this step; those that are not are due again."""
        for seq_id, event in list(self._open.items()):
            if event.scores is not None:
                del self._open[seq_id]


def _events(task: ObservationTask) -> Iterator[tuple[int, int]]:
    """Ids of sequences, and the positions of their events' first queries."""
    return zip(task.seq_ids.tolist(), task.plan.query_start.tolist(), strict=True)
