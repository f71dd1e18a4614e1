"""Open events: the host waits for their scores, or has them and has not scheduled them yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvserve.scheduler.messages.event import NEXT_STATES, EventState, Scores
from kvserve.scheduler.messages.output import CompactionTask, ObservationTask


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """An event that is scored before it is scheduled; ``place`` is its index in ``scores``.

    ``query_start``, the position of its first query, identifies it: a sequence that is preempted in
    the step that scores its event may be due for another event when the scores arrive.
    """

    state: EventState
    query_start: int
    scores: Scores | None = None
    place: int = 0

    def to(self, state: EventState, scores: Scores | None = None, place: int = 0) -> OpenEvent:
        """The event in its next state."""
        assert state in NEXT_STATES[self.state], f"{self.state.value} -> {state.value}"
        return replace(self, state=state, scores=scores, place=place)


class EventLives:
    """Open events by sequence; ``entered`` counts events by the states they have entered.

    Only events that have to be scored before they are scheduled are ever open.
    """

    def __init__(self) -> None:
        self.entered: Counter[EventState] = Counter()
        self._open: dict[int, OpenEvent] = {}

    @property
    def scoring(self) -> bool:
        """Whether any event waits for its scores."""
        return any(event.state is EventState.SCORING for event in self._open.values())

    def is_scoring(self, seq_id: int) -> bool:
        """Whether a sequence's event waits for its scores."""
        return seq_id in self._open and self._open[seq_id].state is EventState.SCORING

    def scored(self, seq_id: int, query_start: int) -> OpenEvent | None:
        """A sequence's event with its scores, if those scores are of this event."""
        event = self._open.get(seq_id)
        if event is None or event.state is not EventState.SCORED:
            return None
        return event if event.query_start == query_start else None

    def start_scoring(self, task: ObservationTask) -> None:
        """``DUE`` -> ``SCORING``: the step that is being scheduled scores them."""
        for seq_id, query_start in _events(task):
            assert seq_id not in self._open
            self._open[seq_id] = OpenEvent(EventState.DUE, query_start).to(EventState.SCORING)
        self.entered[EventState.SCORING] += len(task.rows)

    def take_scores(self, task: ObservationTask, scores: Scores) -> None:
        """``SCORING`` -> ``SCORED``: a step has come back with its answer."""
        for place, (seq_id, _) in enumerate(_events(task)):
            self._open[seq_id] = self._open[seq_id].to(EventState.SCORED, scores, place)
        self.entered[EventState.SCORED] += len(task.rows)

    def close_scored(self) -> None:
        """``SCORED`` -> ``SCHEDULED`` in this step, or back to ``DUE``."""
        for seq_id, event in list(self._open.items()):
            if event.state is EventState.SCORED:
                del self._open[seq_id]

    def schedule(self, task: CompactionTask) -> None:
        """``DUE`` or ``SCORED`` -> ``SCHEDULED``."""
        self.entered[EventState.SCHEDULED] += len(task.rows)

    def apply(self, tasks: Iterable[CompactionTask]) -> None:
        """``SCHEDULED`` -> ``APPLIED``: their step has come back."""
        self.entered[EventState.APPLIED] += sum(len(task.rows) for task in tasks)

    def give_up(
        self, scored: Iterable[ObservationTask], scheduled: Iterable[CompactionTask]
    ) -> None:
        """``SCORING`` or ``SCHEDULED`` -> ``DUE``: their step has failed."""
        for task in scored:
            for seq_id, _ in _events(task):
                self._open[seq_id].to(EventState.DUE)
                del self._open[seq_id]
            self.entered[EventState.SCORING] -= len(task.rows)
        self.entered[EventState.SCHEDULED] -= sum(len(task.rows) for task in scheduled)


def _events(task: ObservationTask) -> Iterator[tuple[int, int]]:
    """Ids of sequences, and the positions of their events' first queries."""
    return zip(task.seq_ids.tolist(), task.plan.query_start.tolist(), strict=True)
