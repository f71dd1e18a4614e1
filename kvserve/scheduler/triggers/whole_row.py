"""Triggers whose events take one window: the whole row, or all of it behind its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import (
    NO_EVENT,
    NOT_LOGGING,
    EvictionSpec,
    RowState,
    Trigger,
)


@dataclass(frozen=True)
class AtPrefillEnd(Trigger):
    """One event at the prompt's end: the whole row is cut to its budget, if it is longer.

    In a continued conversation each turn's prompt has one, unless it has fewer tokens than
    ``num_queries``.
    """

    budget: Budget
    num_queries: int
    intact: int = 0

    def next_event(self, rows: RowState) -> IntArray:
        held = rows.kv_len + rows.num_prompt - rows.num_computed  # at the prompt's end
        due = (rows.first_uncompressed_pos == 0) & (self.budget.of(held, rows.num_prompt) < held)
        return np.where(due, rows.num_prompt, NO_EVENT).astype(np.int32)

    def next_turn(self, rows: RowState, num_prompt: IntArray) -> tuple[IntArray, IntArray]:
        cut = num_prompt - rows.num_computed >= self.num_queries
        first_uncompressed_pos = np.where(cut, 0, rows.first_uncompressed_pos)
        return np.where(cut, num_prompt, rows.num_prompt), first_uncompressed_pos

    def plan(self, rows: RowState) -> EvictionSpec:
        keep = self.budget.of(rows.kv_len, rows.num_computed)
        return whole_row(rows, np.zeros_like(keep), keep, self.num_queries)


@dataclass(frozen=True)
class WhenOver(Trigger):
    """An event whenever ``limit`` entries are held, down to ``keep``: bounds what a sequence holds.

    With ``protect_prompt`` the prompt neither counts nor is evicted; without it a prompt above the
    limit is cut at its end, and every event selects from the whole row.
    """

    limit: int
    keep: int
    num_queries: int
    protect_prompt: bool
    intact: int = 0

    def next_event(self, rows: RowState) -> IntArray:
        free = rows.num_computed + self.limit - (rows.kv_len - protected(rows, self.protect_prompt))
        return np.asarray(np.maximum(rows.num_prompt, free))

    def plan(self, rows: RowState) -> EvictionSpec:
        return whole_row(rows, protected(rows, self.protect_prompt), self.keep, self.num_queries)


@dataclass(frozen=True)
class Bounded(Trigger):
    """A prompt above ``keep`` is cut at its end; later the row is cut when it holds ``limit``.

    With ``block`` the prompt is also cut every ``block`` of its tokens, so that later ones attend
    to the survivors alone and the row never holds more than ``keep + block`` entries. Without
    ``limit`` generated tokens stay. In a continued conversation each turn's prompt is cut like the
    first, if it has at least ``num_queries`` tokens, and with ``block`` only if no queries score.
    """

    keep: int
    limit: int | None
    num_queries: int
    block: int | None = None
    intact: int = 0

    def next_event(self, rows: RowState) -> IntArray:
        evicted = rows.num_computed - rows.kv_len
        over = np.maximum(evicted + self.keep, rows.num_computed) + 1
        reads = (rows.num_computed < rows.num_prompt) & (over <= rows.num_prompt)
        cut = rows.num_prompt
        if self.block is not None:
            cut = np.minimum(-(-over // self.block) * self.block, cut)
        later: IntArray | int = NO_EVENT if self.limit is None else evicted + self.limit
        return np.where(reads, cut, np.maximum(rows.num_prompt, later)).astype(np.int32)

    def next_turn(self, rows: RowState, num_prompt: IntArray) -> tuple[IntArray, IntArray]:
        cut = num_prompt - rows.num_computed >= self.num_queries
        cut &= self.block is None or not self.num_queries  # a block may end before they are there
        return np.where(cut, num_prompt, rows.num_prompt), rows.first_uncompressed_pos

    def plan(self, rows: RowState) -> EvictionSpec:
        return whole_row(rows, np.zeros_like(rows.kv_len), self.keep, self.num_queries)


@dataclass(frozen=True)
class EveryStep(Trigger):
    """One entry is evicted for each new one, once more than ``keep`` are held.

    A prompt above ``keep`` is cut at its end; with ``generated`` off that is the only event. Every
    query counts: the first event takes all of them, each later event those since the last.
    """

    num_queries = 1
    keep: int
    generated: bool = True

    def next_event(self, rows: RowState) -> IntArray:
        over = rows.num_computed - rows.kv_len + self.keep + 1
        due: IntArray = np.maximum(rows.num_prompt, over)
        if self.generated:
            return due
        return np.where(
            (rows.first_uncompressed_pos == 0) & (over <= rows.num_prompt), due, NO_EVENT
        )

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return np.where(next_event == NO_EVENT, NOT_LOGGING, rows.first_uncompressed_pos)

    def plan(self, rows: RowState) -> EvictionSpec:
        since = rows.num_computed - rows.first_uncompressed_pos
        return whole_row(rows, np.zeros_like(rows.kv_len), self.keep, since)


def protected(rows: RowState, protect_prompt: bool) -> IntArray:
    """Entries in front of each row that no event takes: those of its prompt, or none. The whole
    prompt counts, even before all of it is in the cache."""
    return rows.num_prompt if protect_prompt else np.zeros_like(rows.num_prompt)


def whole_row(
    rows: RowState, start: IntArray, keep: IntArray | int, num_queries: IntArray | int
) -> EvictionSpec:
    """One window from ``start`` to the row's end, of which ``keep`` entries survive."""
    length = rows.kv_len - start
    return EvictionSpec(
        region_start=start,
        windows=np.ones_like(length),
        window_len=length,
        keep=np.zeros_like(length) + keep,
        query_start=rows.num_computed - num_queries,
        num_queries=np.zeros_like(length) + num_queries,
        first_uncompressed_pos=rows.num_computed,
    )
