"""Events that are due, before they are scheduled: what each would do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import EventKind
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
