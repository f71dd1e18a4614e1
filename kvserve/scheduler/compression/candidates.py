"""Events before they are scheduled: what each that is due would do, and which are being scored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import EventKind, Scores
from kvserve.scheduler.messages.output import NO_TURNS, BegunTurns, CompactionTask, ObservationTask
from kvserve.scheduler.triggers.trigger import EvictionSpec, Trigger

Choices = np.ndarray[Any, np.dtype[np.object_]]


@dataclass(frozen=True, slots=True)
class EventCandidates:
    """Events of one policy that may be scheduled: rows ``at`` go from ``old`` to ``new`` entries.

    ``old``, ``new``: ``[LG, n, R]``. If events have to be scored first, ``known`` is false until
    they are, and ``new`` equals ``old``. ``choices [n]``: what the handler has read from scores.
    """

    policy_id: int
    kind: EventKind
    trigger: Trigger
    at: IntArray
    plan: EvictionSpec
    old: IntArray
    new: IntArray
    layout: KVLayout
    known: bool = False
    choices: Choices | None = None

    @property
    def num_scored_queries(self) -> IntArray:
        """Queries whose attention each event still has to work out."""
        scored = self.known and self.kind is not EventKind.EVEN
        return 0 * self.at if scored else self.plan.num_scored_queries

    @property
    def blocks_freed(self) -> IntArray:
        """Blocks of keys and values that each event gives back."""
        size = self.layout.block_size
        return np.asarray((-(-self.old // size) - -(-self.new // size)).sum(axis=(0, 2)))

    def part(self, at: IntArray | slice) -> EventCandidates:
        """The events ``at`` alone."""
        return replace(
            self,
            at=self.at[at],
            plan=self.plan.part(at),
            old=self.old[:, at],
            new=self.new[:, at],
            choices=None if self.choices is None else self.choices[at],
        )


def some_of(
    candidates: list[EventCandidates], mask: np.ndarray[Any, Any]
) -> Iterator[EventCandidates]:
    """The events that ``mask`` selects from all ``candidates``, in order; no empty groups."""
    ends = np.cumsum([len(events.at) for events in candidates])
    for events, end in zip(candidates, ends, strict=True):
        part = events.part(mask[end - len(events.at) : end])
        if len(part.at):
            yield part


@dataclass(frozen=True, slots=True)
class ScheduledEvents:
    """A step's events: those that it carries out, and those that it scores for a later one."""

    compactions: tuple[CompactionTask, ...] = ()
    observations: tuple[ObservationTask, ...] = ()
    turns: BegunTurns = NO_TURNS
    """Turns that begin before them."""


@dataclass(frozen=True, slots=True)
class OpenEvent:
    """An event being scored; once its step has come back, it is number ``place`` in ``scores``.

    ``query_start``, the position of its first query, identifies it: a sequence that is preempted in
    the step that scores its event may be due for another event when the scores arrive.
    """

    query_start: int
    scores: Scores | None = None
    place: int = 0


class OpenEvents(dict[int, OpenEvent]):
    """Open events by sequence."""

    @property
    def scoring(self) -> bool:
        """Whether any event waits for its scores."""
        return any(event.scores is None for event in self.values())

    def is_scoring(self, seq_id: int) -> bool:
        """Whether a sequence's event waits for its scores."""
        return seq_id in self and self[seq_id].scores is None

    def scored(self, seq_id: int, query_start: int) -> OpenEvent | None:
        """A sequence's event with its scores, if those scores are of this event."""
        event = self.get(seq_id)
        if event is None or event.scores is None or event.query_start != query_start:
            return None
        return event

    def start_scoring(self, task: ObservationTask) -> None:
        """The step that is being scheduled scores them."""
        for seq_id, query_start in _events(task):
            assert seq_id not in self
            self[seq_id] = OpenEvent(query_start)

    def take_scores(self, task: ObservationTask, scores: Scores) -> None:
        """A step has come back with its answer."""
        for place, (seq_id, query_start) in enumerate(_events(task)):
            assert self.is_scoring(seq_id)
            self[seq_id] = OpenEvent(query_start, scores, place)

    def close_scored(self) -> None:
        """The scored events are scheduled in this step; those that are not are due again."""
        for seq_id, event in list(self.items()):
            if event.scores is not None:
                del self[seq_id]


def _events(task: ObservationTask) -> Iterator[tuple[int, int]]:
    """Ids of sequences, and the positions of their events' first queries."""
    return zip(task.seq_ids.tolist(), task.plan.query_start.tolist(), strict=True)
