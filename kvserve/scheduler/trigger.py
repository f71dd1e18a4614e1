"""When a sequence is due for compaction, and what an event does to its lengths.

Events are due at logical positions of the sequence itself, so what happens to a sequence depends
neither on its neighbours nor on its chunks or preemptions. The scheduler reads only these objects;
policies (which need tensors) hand them out. Every method takes all rows of one trigger at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import numpy as np

from kvserve.scheduler.block_pool import IntArray

NO_EVENT = 2**31 - 1
NOT_LOGGING = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RowState:
    """What triggers may know of n rows; all ``[n]``.

    ``num_computed`` is logical, ``kv_len`` physical; ``run_start`` is the logical position of the
    oldest token that no event has taken. ``block_size`` is the cache's.
    """

    num_prompt: IntArray
    num_computed: IntArray
    kv_len: IntArray
    run_start: IntArray
    block_size: int = 1


@dataclass(frozen=True, slots=True)
class EventPlan:
    """One event per row; all ``[n]``.

    ``windows`` neighbouring windows of ``window_len`` entries each begin at physical entry
    ``region_start``; ``keep`` entries of each survive. ``query_start`` is the logical position of
    the first window's first query; further windows' queries lie ``window_len`` apart.
    ``num_queries`` is how many of them a window needs.
    """

    region_start: IntArray
    windows: IntArray
    window_len: IntArray
    keep: IntArray
    query_start: IntArray
    num_queries: IntArray
    run_start: IntArray

    def part(self, at: IntArray | slice) -> EventPlan:
        """The events ``at`` alone."""
        return EventPlan(*(getattr(self, f.name)[at] for f in fields(EventPlan)))

    @property
    def evicted(self) -> IntArray:
        evicted: IntArray = self.windows * (self.window_len - self.keep)
        return evicted


class Trigger(Protocol):
    """``num_queries`` is the most queries a window must have (0: keys alone).

    They are logged, or, unless ``logs``, recomputed from the tokens that the event's task carries.
    """

    @property
    def num_queries(self) -> int: ...

    @property
    def logs(self) -> bool: ...

    def start(self, num_prompt: IntArray) -> IntArray:
        """``run_start`` of a sequence that has computed nothing."""
        ...

    def next_event(self, rows: RowState) -> IntArray:
        """Logical positions of the next events, or ``NO_EVENT``."""
        ...

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        """Logical positions from which queries are logged, or ``NOT_LOGGING``."""
        ...

    def plan(self, rows: RowState) -> EventPlan:
        """The events of rows that are due."""
        ...


@dataclass(frozen=True)
class Budget:
    """Entries to keep of n: a number of ``tokens``, or an exact ``ratio`` of them.

    A ratio is rounded down, or to the nearest where ``nearest``; never below ``least``.
    """

    tokens: int | None = None
    ratio: Fraction | None = None
    least: int = 1
    nearest: bool = False

    def of(self, n: IntArray) -> IntArray:
        """min(n, budget), elementwise."""
        if self.ratio is None:
            return np.minimum(n, self.tokens or 0)
        top, bottom = self.ratio.numerator, self.ratio.denominator
        wide = np.asarray(n, np.int64)
        kept = (2 * top * wide + bottom) // (2 * bottom) if self.nearest else top * wide // bottom
        return np.minimum(n, np.maximum(kept, self.least))


@dataclass(frozen=True)
class Never:
    """The trigger of a policy that never compacts."""

    logs: ClassVar[bool] = True
    num_queries: int = 0

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt

    def next_event(self, rows: RowState) -> IntArray:
        return np.full_like(rows.num_prompt, NO_EVENT)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return np.full_like(rows.num_prompt, NOT_LOGGING)

    def plan(self, rows: RowState) -> EventPlan:
        raise AssertionError("Never has no events")


@dataclass(frozen=True)
class AtPrefillEnd:
    """Once, when the prompt is in: the whole row is cut to its budget, if it is longer."""

    logs: ClassVar[bool] = True
    budget: Budget
    num_queries: int

    def start(self, num_prompt: IntArray) -> IntArray:
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        due = (rows.run_start == 0) & (self.budget.of(rows.num_prompt) < rows.num_prompt)
        return np.where(due, rows.num_prompt, NO_EVENT).astype(np.int32)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return _last_queries(next_event, self.num_queries)

    def plan(self, rows: RowState) -> EventPlan:
        return _whole_row(rows, np.zeros_like(rows.kv_len), self.budget.of, self.num_queries)


@dataclass(frozen=True)
class WhenOver:
    """Whenever ``limit`` entries are held, down to ``keep``: a bound on what a sequence holds.

    With ``protect_prompt`` the prompt neither counts nor takes part; without it a prompt above the
    limit is cut at its end, and every event sees the whole row.
    """

    logs: ClassVar[bool] = True
    limit: int
    keep: int
    num_queries: int
    protect_prompt: bool

    def start(self, num_prompt: IntArray) -> IntArray:
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        free = rows.num_computed + self.limit - (rows.kv_len - self._protected(rows))
        return np.asarray(np.maximum(rows.num_prompt, free))

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return _last_queries(next_event, self.num_queries)

    def plan(self, rows: RowState) -> EventPlan:
        def keep(n: IntArray) -> IntArray:
            return np.full_like(n, self.keep)

        return _whole_row(rows, self._protected(rows), keep, self.num_queries)

    def _protected(self, rows: RowState) -> IntArray:
        # Before the prompt is in, its entries still to come count as held.
        return rows.num_prompt if self.protect_prompt else np.zeros_like(rows.num_prompt)


@dataclass(frozen=True)
class Bounded:
    """A prompt above ``keep`` is cut at its end, and whatever follows when ``limit`` are held.

    With ``block`` it is cut every ``block`` of its tokens too, so that later ones attend to the
    survivors alone and never more than ``keep + block`` entries are held. Without ``limit``
    generated text stays.
    """

    logs: ClassVar[bool] = True
    keep: int
    limit: int | None
    num_queries: int
    block: int | None = None

    def start(self, num_prompt: IntArray) -> IntArray:
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        evicted = rows.num_computed - rows.kv_len
        over = evicted + self.keep + 1
        reads = (rows.num_computed < rows.num_prompt) & (over <= rows.num_prompt)
        cut = rows.num_prompt
        if self.block is not None:
            cut = np.minimum(-(-over // self.block) * self.block, cut)
        later: IntArray | int = NO_EVENT if self.limit is None else evicted + self.limit
        return np.where(reads, cut, np.maximum(rows.num_prompt, later)).astype(np.int32)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return _last_queries(next_event, self.num_queries)

    def plan(self, rows: RowState) -> EventPlan:
        def keep(n: IntArray) -> IntArray:
            return np.full_like(n, self.keep)

        return _whole_row(rows, np.zeros_like(rows.kv_len), keep, self.num_queries)


@dataclass(frozen=True)
class EveryStep:
    """One entry makes room for each new one, once more than ``keep`` are held.

    A prompt above ``keep`` is cut at its end; with ``generated`` off that is all. Every query
    counts: all of them for the first event, and for each further event those since the last.
    """

    logs: ClassVar[bool] = True
    num_queries: ClassVar[int] = 1
    keep: int
    generated: bool = True

    def start(self, num_prompt: IntArray) -> IntArray:
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        over = rows.num_computed - rows.kv_len + self.keep + 1
        due: IntArray = np.maximum(rows.num_prompt, over)
        if self.generated:
            return due
        return np.where((rows.run_start == 0) & (over <= rows.num_prompt), due, NO_EVENT)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return np.where(next_event == NO_EVENT, NOT_LOGGING, rows.run_start)

    def plan(self, rows: RowState) -> EventPlan:
        return EventPlan(
            region_start=np.zeros_like(rows.kv_len),
            windows=np.ones_like(rows.kv_len),
            window_len=rows.kv_len,
            keep=np.full_like(rows.kv_len, self.keep),
            query_start=rows.run_start,
            num_queries=rows.num_computed - rows.run_start,
            run_start=rows.num_computed,
        )


@dataclass(frozen=True)
class Periodic:
    """Every ``period`` decode steps of the sequence, once ``window`` tokens are uncompressed.

    KvLLM's Algorithm 1 (arXiv 2607.01237), token-granular: the window is anchored at the oldest
    uncompressed token and all pending windows are taken at once. ``keep`` of the first
    ``window - buffer`` tokens survive each window; the ``buffer`` opens the next one. Without
    ``protect_prompt`` the prompt's windows are taken at its end. ``logs`` is off where queries are
    recomputed instead.
    """

    window: int
    buffer: int
    keep: int
    period: int
    protect_prompt: bool = True
    logs: bool = True

    @property
    def compressible(self) -> int:
        """n: tokens of a window that compete for ``keep`` places."""
        return self.window - self.buffer

    @property
    def num_queries(self) -> int:
        return self.window

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt if self.protect_prompt else np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        """First position, a whole number of periods after the prompt, with a full window."""
        steps = np.maximum(rows.run_start + self.window - rows.num_prompt, 0)
        return np.asarray(rows.num_prompt + -(-steps // self.period) * self.period)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return rows.run_start if self.logs else np.full_like(rows.run_start, NOT_LOGGING)

    def pending_windows(self, run: IntArray) -> IntArray:
        """Windows in ``run >= buffer`` uncompressed tokens; neighbours overlap by the buffer."""
        return np.asarray((run - self.buffer) // self.compressible)

    def plan(self, rows: RowState) -> EventPlan:
        run = rows.num_computed - rows.run_start
        windows = self.pending_windows(run)
        return EventPlan(
            region_start=rows.kv_len - run,
            windows=windows,
            window_len=np.full_like(run, self.compressible),
            keep=np.full_like(run, self.keep),
            query_start=rows.run_start,
            num_queries=np.full_like(run, self.window),
            run_start=rows.run_start + windows * self.compressible,
        )


@dataclass(frozen=True)
class EngineWide:
    """KvLLM's Algorithm 1 as printed (arXiv 2607.01237): the engine counts the steps.

    At every ``period``-th step since the last event the first ``most`` sequences, oldest first, are
    taken that hold ``window`` uncompressed tokens in full blocks at their tail; of these blocks'
    older tokens ``keep`` survive. What grows past the window while a sequence waits stays. Who is
    taken depends on the neighbours, so the scheduler decides it, and records it for replays.
    """

    logs: ClassVar[bool] = False
    window: int
    buffer: int
    keep: int
    period: int
    most: int

    @property
    def num_queries(self) -> int:
        return self.window

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt

    def next_event(self, rows: RowState) -> IntArray:
        return np.full_like(rows.num_prompt, NO_EVENT)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return np.full_like(rows.num_prompt, NOT_LOGGING)

    def eligible(self, rows: RowState) -> IntArray:
        """Whether a row's trailing full blocks hold a whole generated window: bool [n]."""
        run_entry = rows.kv_len - (rows.num_computed - rows.run_start)
        return np.asarray(self._region_start(rows) >= np.maximum(run_entry, rows.num_prompt))

    def plan(self, rows: RowState) -> EventPlan:
        start = self._region_start(rows)
        position = rows.num_computed - (rows.kv_len - start)
        taken = np.full_like(start, self.window - self.buffer)
        return EventPlan(
            region_start=start,
            windows=np.ones_like(start),
            window_len=taken,
            keep=np.full_like(start, self.keep),
            query_start=position,
            num_queries=np.full_like(start, self.window),
            run_start=position + taken,
        )

    def _region_start(self, rows: RowState) -> IntArray:
        return np.asarray(rows.kv_len // rows.block_size * rows.block_size - self.window)


def _last_queries(next_event: IntArray, count: int) -> IntArray:
    """Log the ``count`` queries in front of the next event, if there is one."""
    if count == 0:
        return np.full_like(next_event, NOT_LOGGING)
    first = np.maximum(next_event - count, 0)
    return np.where(next_event == NO_EVENT, NOT_LOGGING, first).astype(np.int32)


def _whole_row(rows: RowState, start: IntArray, keep: Any, num_queries: int) -> EventPlan:
    """One window from ``start`` to the row's end."""
    length = rows.kv_len - start
    return EventPlan(
        region_start=start,
        windows=np.ones_like(length),
        window_len=length,
        keep=keep(length),
        query_start=rows.num_computed - num_queries,
        num_queries=np.full_like(length, num_queries),
        run_start=rows.num_computed,
    )
