"""Events before and after they are booked: what they would do, and what a step does of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import CompactionTask, ObservationTask
from kvserve.scheduler.trigger import EventPlan


@dataclass(frozen=True, slots=True)
class EventPlans:
    """Events of one policy that could be booked: rows ``at`` go from ``old`` to ``new`` entries.

    ``old``, ``new``: ``[LG, n, R]``. Those of an ``uneven`` policy have to be observed first; until
    then the new ones are not ``known``.
    """

    policy_id: int
    at: IntArray
    plan: EventPlan
    old: IntArray
    new: IntArray
    uneven: bool
    known: bool
    layout: KVLayout
    columns: IntArray | None = None
    """Of a policy that keeps whole blocks, which: an object ``[LG, R, K]`` for each row."""

    @property
    def observed(self) -> IntArray:
        """Queries that each event still has to observe."""
        return 0 * self.at if self.uneven and self.known else self.plan.observed

    @property
    def blocks_freed(self) -> IntArray:
        """Blocks of keys and values that each event gives back."""
        size = self.layout.block_size
        return np.asarray((-(-self.old // size) - -(-self.new // size)).sum(axis=(0, 2)))

    def part(self, at: IntArray | slice) -> EventPlans:
        old, new = self.old[:, at], self.new[:, at]
        columns = None if self.columns is None else self.columns[at]
        plan = self.plan.part(at)
        return replace(self, at=self.at[at], plan=plan, old=old, new=new, columns=columns)


def chosen(plans: list[EventPlans], mask: IntArray) -> list[EventPlans]:
    """The events that ``mask`` names, over all ``plans`` in order; no plan without any."""
    ends = np.cumsum([len(plan.at) for plan in plans])
    parts = [
        plan.part(mask[end - len(plan.at) : end]) for plan, end in zip(plans, ends, strict=True)
    ]
    return [part for part in parts if len(part.at)]


@dataclass(frozen=True, slots=True)
class Booked:
    """Events of a step: those that are carried out, and those that are observed for the next."""

    compactions: tuple[CompactionTask, ...] = ()
    observations: tuple[ObservationTask, ...] = ()
