"""Views of the pool for a client that watches it; without one, nothing is computed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.stats import PoolView

if TYPE_CHECKING:
    from kvserve.engine.core.engine_core import EngineCore

INTERVAL_S = 0.2
MOST_CELLS = 16_384
"""Cells of a view; in a larger pool each stands for several blocks."""


class PoolWatch:
    """Views of one core's pool, at most one per ``INTERVAL_S``, and none if nothing changed."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._on = False
        self._next = 0.0
        self._shown: tuple[int, ...] = ()

    def switch(self, on: bool) -> None:
        """Begin or end to watch."""
        self._on, self._next, self._shown = on, 0.0, ()

    @property
    def due(self) -> bool:
        if not self._on or time.monotonic() < self._next:
            return False
        return self._core.has_work or self._shown != self._state()

    def view(self) -> PoolView:
        """The pool as it is now: what each block is held for."""
        core, scheduler = self._core, self._core.scheduler
        self._next, self._shown = time.monotonic() + INTERVAL_S, self._state()
        stats, blocks = core.stats(), scheduler.blocks
        rows = [seq.row for seq in scheduler.running]
        numbers = np.zeros(scheduler.rows.num_rows, np.int32)
        numbers[rows] = np.arange(len(rows))
        owners = block_owners(blocks, numbers)
        step = max(1, -(-len(owners) // MOST_CELLS))
        shown = owners[::step]
        # As runs: an owner, and how often it comes in a row.
        starts = np.flatnonzero(np.diff(shown, prepend=-1))
        lengths = np.diff(starts, append=len(shown))
        cells = np.stack([shown[starts], lengths], axis=1).ravel().tolist()
        logged = blocks.log.blocks_of_rows(len(numbers))[rows].tolist()
        return PoolView(time.time(), stats, step, cells, logged)

    def _state(self) -> tuple[int, ...]:
        """Counts that tell whether an idle engine's pool has changed: one of them has, then."""
        scheduler = self._core.scheduler
        pool = scheduler.pool.num_free, scheduler.blocks.num_cached
        return scheduler.totals.steps_total, len(scheduler.waiting), *pool, int(self._core.has_work)


FREE, CACHED, LOGGED, OTHER, FIRST_ROW = range(5)
"""What a block is held for: nothing, later sequences alone, queries, another group; then rows."""


def block_owners(blocks: BlockManager, numbers: IntArray) -> IntArray:
    """What each block from 1 on is held for: ``FIRST_ROW + numbers[row]`` if a row holds keys and
    values in it. ``numbers [rows]``; a shared block counts for the last of its rows.
    """
    owners: IntArray = np.where(blocks.pool.ref > 0, CACHED, FREE).astype(np.int32)
    named, rows = blocks.kv.named_by_row(len(numbers))
    owners[named] = FIRST_ROW + numbers[rows]
    owners[blocks.log.named_by_row(len(numbers))[0]] = LOGGED
    for group in blocks.groups[2:]:
        for table in group.tables:
            owners[table.named_by_row(len(numbers))[0]] = OTHER
    return owners[1:]
