"""Events that add scores up before one of them evicts: few queries have to be logged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.trigger import EvictionSpec, RowState, Trigger


@dataclass(frozen=True)
class Summing(Trigger):
    """An event every ``every`` tokens, whose queries score all uncompressed ones: scores are added
    up. One with a full window keeps ``keep`` of its older tokens and its ``buffer``, which begins
    the next window. ``every`` divides both. The prompt is left alone."""

    window: int
    buffer: int
    keep: int
    every: int

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.every

    @property
    def intact(self) -> int:  # type: ignore[override]
        return self.buffer

    @property
    def log_span(self) -> int:  # type: ignore[override]
        return self.every

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt

    def next_event(self, rows: RowState) -> IntArray:
        run = np.maximum(rows.num_computed - rows.first_uncompressed_pos, 0)
        return np.asarray(rows.first_uncompressed_pos + (run // self.every + 1) * self.every)

    def plan(self, rows: RowState) -> EvictionSpec:
        run = rows.num_computed - rows.first_uncompressed_pos
        full = run >= self.window
        taken = np.where(full, self.window - self.buffer, 0)
        return EvictionSpec(
            region_start=rows.kv_len - run,
            windows=np.ones_like(run),
            window_len=run,
            keep=np.where(full, self.keep + self.buffer, run),
            query_start=rows.num_computed - self.every,
            num_queries=np.full_like(run, self.every),
            first_uncompressed_pos=rows.first_uncompressed_pos + taken,
        )
