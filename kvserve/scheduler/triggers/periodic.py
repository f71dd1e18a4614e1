"""Events that come again and again: KvLLM's (arXiv 2607.01237, Algorithm 1), as built here and as
printed, those of fixed rounds, and SpindleKV's, as generated tokens fill blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import (
    NO_EVENT,
    EventKind,
    EvictionSpec,
    RowState,
    Trigger,
    last_queries,
)
from kvserve.scheduler.triggers.whole_row import protected, whole_row


@dataclass(frozen=True)
class Periodic(Trigger):
    """An event every ``period`` decode steps, once ``window`` tokens are uncompressed.

    KvLLM's Algorithm 1 (arXiv 2607.01237), token-granular: the first window begins at the oldest
    uncompressed token, and an event takes all pending windows. ``keep`` of a window's first
    ``window - buffer`` tokens survive; its ``buffer`` begins the next window. Without
    ``protect_prompt`` the prompt's windows are taken at its end. ``logs`` is off if queries are
    recomputed instead. In a continued conversation the windows go on over later prompts; with
    ``protect_turns`` later prompts are kept, and so are tokens before them that are uncompressed.
    ``log_stride`` divides the window and its buffer, so that windows share the queries of both.
    """

    window: int
    buffer: int
    keep: int
    period: int
    protect_prompt: bool = True
    logs: bool = True
    protect_turns: bool = False
    log_stride: int = 1

    @property
    def compressible(self) -> int:
        """n: tokens of a window that compete for ``keep`` places."""
        return self.window - self.buffer

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def intact(self) -> int:  # type: ignore[override]
        return self.buffer

    @property
    def log_span(self) -> int:  # type: ignore[override]
        return self.compressible

    def next_turn(self, rows: RowState, num_prompt: IntArray) -> tuple[IntArray, IntArray]:
        if self.protect_turns:
            return num_prompt, num_prompt
        return rows.num_prompt, rows.first_uncompressed_pos

    def can_compress_early(self, rows: RowState) -> IntArray:
        return np.asarray(self.pending_windows(rows.num_computed - rows.first_uncompressed_pos) > 0)

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt if self.protect_prompt else np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        """First position, a whole number of periods after the prompt, with a full window."""
        steps = np.maximum(rows.first_uncompressed_pos + self.window - rows.num_prompt, 0)
        return np.asarray(rows.num_prompt + -(-steps // self.period) * self.period)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return rows.first_uncompressed_pos if self.logs else super().log_from(rows, next_event)

    def pending_windows(self, run: IntArray) -> IntArray:
        """Windows in ``run >= buffer`` uncompressed tokens; neighbours overlap by the buffer."""
        return np.asarray((run - self.buffer) // self.compressible)

    def plan(self, rows: RowState) -> EvictionSpec:
        run = rows.num_computed - rows.first_uncompressed_pos
        windows = self.pending_windows(run)
        return EvictionSpec(
            region_start=rows.kv_len - run,
            windows=windows,
            window_len=np.full_like(run, self.compressible),
            keep=np.full_like(run, self.keep),
            query_start=rows.first_uncompressed_pos,
            num_queries=np.full_like(run, self.window),
            first_uncompressed_pos=rows.first_uncompressed_pos + windows * self.compressible,
        )


@dataclass(frozen=True)
class EngineWide(Trigger):
    """KvLLM's Algorithm 1 as printed (arXiv 2607.01237): the engine counts the steps.

    Every ``period`` steps since the last event it takes the ``most`` oldest sequences that hold
    ``window`` uncompressed tokens in full blocks at their tail. Of the first ``window - buffer`` of
    these tokens ``keep`` survive. Tokens that leave the window while a sequence waits stay. Which
    sequences are taken depends on the others in the batch, so the scheduler decides it and records
    it for replays.
    """

    logs = False
    counts_steps = True
    window: int
    buffer: int
    keep: int
    period: int
    most: int

    @property
    def num_queries(self) -> int:  # type: ignore[override]
        return self.window

    @property
    def intact(self) -> int:  # type: ignore[override]
        return self.buffer

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt

    def next_event(self, rows: RowState) -> IntArray:
        return np.full_like(rows.num_prompt, NO_EVENT)

    def eligible(self, rows: RowState) -> IntArray:
        """Whether a row's trailing full blocks hold a whole generated window: bool [n]."""
        run_entry = rows.kv_len - (rows.num_computed - rows.first_uncompressed_pos)
        return np.asarray(self._region_start(rows) >= np.maximum(run_entry, rows.num_prompt))

    def plan(self, rows: RowState) -> EvictionSpec:
        start = self._region_start(rows)
        position = rows.num_computed - (rows.kv_len - start)
        taken = np.full_like(start, self.window - self.buffer)
        return EvictionSpec(
            region_start=start,
            windows=np.ones_like(start),
            window_len=taken,
            keep=np.full_like(start, self.keep),
            query_start=position,
            num_queries=np.full_like(start, self.window),
            first_uncompressed_pos=position + taken,
        )

    def _region_start(self, rows: RowState) -> IntArray:
        return np.asarray(rows.kv_len // rows.block_size * rows.block_size - self.window)


@dataclass(frozen=True)
class Rounds(Trigger):
    """An event whenever ``period`` entries more are held than the last one left, or would leave.

    With ``protect_prompt`` the prompt stays: a budget of tokens counts it, and what it leaves over
    is for generated entries, at least ``budget.least`` of them; a ratio is of generated tokens
    alone. Otherwise every event selects from the whole row. Keys alone are scored.
    """

    num_queries = 0
    budget: Budget
    period: int
    protect_prompt: bool = True

    def next_event(self, rows: RowState) -> IntArray:
        stays = protected(rows, self.protect_prompt)
        if self.budget.ratio is None:
            held = rows.kv_len - stays
            due = rows.num_computed + self._entries_kept(rows) + self.period - held
        else:
            last = np.maximum(rows.first_uncompressed_pos - stays, self.budget.least)
            due = stays + last + self.period
        return np.asarray(np.maximum(rows.num_prompt, due), np.int32)

    def plan(self, rows: RowState) -> EvictionSpec:
        start = protected(rows, self.protect_prompt)
        return whole_row(rows, start, np.minimum(rows.kv_len - start, self._entries_kept(rows)), 0)

    def _entries_kept(self, rows: RowState) -> IntArray:
        """Entries that an event now would leave behind the protected ones."""
        if self.budget.tokens is not None:
            left = self.budget.tokens - protected(rows, self.protect_prompt)
            return np.asarray(np.maximum(left, self.budget.least))
        seen = rows.num_computed - protected(rows, self.protect_prompt)
        return self.budget.of(seen)


@dataclass(frozen=True)
class QuantizeTrigger(Trigger):
    """Events at the prompt's end, and after every ``period`` more tokens, make codes of entries.

    The first event also evicts, down to ``budget``; the windows of the others are empty. With
    ``raw_fallback`` lanes whose codes would save no block stay raw.
    """

    event_kind = EventKind.CODED
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
