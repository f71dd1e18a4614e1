"""When rows are coded (SpindleKV): at the prompt's end, and as generated tokens fill blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import (
    NO_EVENT,
    EvictionSpec,
    RowState,
    Trigger,
    last_queries,
)


@dataclass(frozen=True)
class QuantizeTrigger(Trigger):
    """Events at the prompt's end, and after every ``period`` more tokens, make codes of entries.

    The first event also evicts, down to ``budget``; the windows of the others are empty. With
    ``raw_fallback`` lanes whose codes would save no block stay raw.
    """

    budget: Budget
    num_queries: int
    period: int
    raw_fallback: bool = True

    def next_event(self, rows: RowState) -> IntArray:
        return np.where(
            rows.first_uncompressed_pos == 0,
            rows.num_prompt,
            rows.first_uncompressed_pos + self.period,
        )

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        first = (rows.first_uncompressed_pos == 0) & (rows.num_prompt > self.num_queries)
        return last_queries(np.where(first, next_event, NO_EVENT), self.num_queries)

    def plan(self, rows: RowState) -> EvictionSpec:
        first = rows.first_uncompressed_pos == 0
        length = np.where(first, rows.kv_len, 0)
        queries = np.where(first & (rows.kv_len > self.num_queries), self.num_queries, 0)
        return EvictionSpec(
            region_start=np.zeros_like(length),
            windows=np.ones_like(length),
            window_len=length,
            keep=self.budget.of(length),
            query_start=rows.num_computed - queries,
            num_queries=queries,
            first_uncompressed_pos=rows.num_computed,
        )
