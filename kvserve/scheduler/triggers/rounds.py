"""TriAttention's events (arXiv 2604.04921): every so many tokens, back to a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import (
    NOT_LOGGING,
    EvictionSpec,
    OnDate,
    RowState,
    whole_row,
)


@dataclass(frozen=True)
class Rounds(OnDate):
    """An event whenever ``period`` entries more are held than the last one left, or would leave.

    With ``protect_prompt`` the prompt stays: a budget of tokens counts it, and what it leaves over
    is for generated entries, at least ``budget.least`` of them; a ratio is of generated tokens
    alone. Otherwise every event selects from the whole row. Keys alone are scored.
    """

    logs: ClassVar[bool] = True
    num_queries: ClassVar[int] = 0
    budget: Budget
    period: int
    protect_prompt: bool = True

    def start(self, num_prompt: IntArray) -> IntArray:
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        protected = self._protected(rows)
        if self.budget.ratio is None:
            held = rows.kv_len - protected
            due = rows.num_computed + self._kept(rows) + self.period - held
        else:
            last = np.maximum(rows.first_uncompressed_pos - protected, self.budget.least)
            due = protected + last + self.period
        return np.asarray(np.maximum(rows.num_prompt, due), np.int32)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return np.full_like(next_event, NOT_LOGGING)

    def plan(self, rows: RowState) -> EvictionSpec:
        start = self._protected(rows)
        return whole_row(rows, start, lambda n: np.minimum(n, self._kept(rows)), 0)

    def _kept(self, rows: RowState) -> IntArray:
        """Entries that an event now would leave behind the protected ones."""
        if self.budget.tokens is not None:
            left = self.budget.tokens - self._protected(rows)
            return np.asarray(np.maximum(left, self.budget.least))
        seen = rows.num_computed - self._protected(rows)
        return self.budget.of(seen)

    def _protected(self, rows: RowState) -> IntArray:
        return rows.num_prompt if self.protect_prompt else np.zeros_like(rows.num_prompt)
