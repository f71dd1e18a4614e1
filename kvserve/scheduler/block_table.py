"""Block tables of all rows and KV groups, in vectorised numpy.

A row holds columns ``[first, end)`` of its table. Both tables of a run have this form: the one of
keys and values, which starts at column 0, and the one of logged queries, addressed by logical
position, whose front is given back. Letters: LG layer groups, R tables per row, M columns.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.block_pool import BlockPool, IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import TableUpdate

NO_UPDATE = TableUpdate(np.zeros(0, np.int64), np.zeros(0, np.int32))


class BlockTable:
    """``blocks [LG, max_rows, R, M]`` with ``first`` and ``end`` ``[LG, max_rows, R]``."""

    def __init__(self, pool: BlockPool, layout: KVLayout, max_rows: int, columns: int) -> None:
        self.pool = pool
        shape = (layout.layer_groups, max_rows, layout.rows)
        self.blocks: IntArray = np.zeros((*shape, columns), np.int32)
        self.first: IntArray = np.zeros(shape, np.int32)
        self.end: IntArray = np.zeros(shape, np.int32)
        self._synced: IntArray = np.zeros(shape, np.int32)

    def start(self, row: int, column: int) -> None:
        """An empty row whose first block will stand in ``column``."""
        self.first[:, row] = self.end[:, row] = self._synced[:, row] = column

    def wanted(self, rows: IntArray, end: IntArray) -> IntArray:
        """Blocks missing up to column ``end``: ``[LG, rows, R]``."""
        missing: IntArray = np.maximum(end - self.end[:, rows], 0)
        return missing

    def extend(self, rows: IntArray, end: IntArray) -> None:
        """Lend the missing blocks; the caller has checked that they are free."""
        before = self.end[:, rows]
        missing = end - before
        if (missing > 0).any():
            where = _entries(rows, before, missing)
            self.blocks[where] = self.pool.allocate(len(where[0]))
            self.end[:, rows] = np.maximum(before, end)

    def adopt(self, row: int, columns: IntArray) -> None:
        """Begin an empty row with shared ``columns [n, LG, R]``, one more reference each."""
        self.pool.share(columns.ravel())
        self.blocks[:, row, :, : len(columns)] = columns.transpose(1, 2, 0)
        self.end[:, row] = len(columns)

    def shared(self, rows: IntArray, columns: IntArray, end: IntArray) -> IntArray:
        """Which blocks in ``columns [n]`` of ``rows [n]`` have more than one reference.

        bool ``[n, LG, R]``; only columns before each group's ``end [LG, n, R]`` count.
        """
        named = self.blocks[:, rows, :, columns]
        inside = columns[:, None, None] < end.transpose(1, 0, 2)
        return np.asarray((self.pool.ref[named] > 1) & inside)

    def keep(self, row: int, columns: IntArray) -> int:
        """Hold only ``columns [LG, R, K]`` of a row, in this order; return the blocks given up."""
        named, _ = self.row_entries(row)
        kept = np.take_along_axis(self.blocks[:, row], columns, axis=2)
        self.pool.share(kept.ravel())
        self.pool.release(named)
        self.blocks[:, row, :, : columns.shape[2]] = kept
        self.end[:, row] = columns.shape[2]
        self._synced[:, row] = 0
        return len(named) - kept.size

    def release_columns(self, row: int, first: IntArray, end: IntArray) -> None:
        """Give back the columns ``[first, end)`` ``[LG, R]`` of a row, those it has; ``name`` next.

        What stands behind them stays.
        """
        end = np.minimum(end, self.end[:, row])
        where = _entries(np.array([row]), first[:, None], (end - first)[:, None])
        self.pool.release(self.blocks[where])

    def name(self, row: int, first: IntArray, end: IntArray, blocks: IntArray) -> None:
        """Put ``blocks [R, M']`` in columns ``[first, end)`` ``[LG, R]``, a reference for each."""
        where = _entries(np.array([row]), first[:, None], (end - first)[:, None])
        named = blocks[where[2], where[3]]
        self.pool.share(named)
        self.blocks[where] = named
        self.end[:, row] = np.maximum(self.end[:, row], end)
        self._synced[:, row] = np.minimum(self._synced[:, row], first)

    def truncate(self, rows: IntArray, end: IntArray) -> IntArray:
        """Give back the columns from ``end [LG, rows, R]`` on; return how many of each row."""
        surplus = np.maximum(self.end[:, rows] - end, 0)
        self.pool.release(self.blocks[_entries(rows, self.end[:, rows] - surplus, surplus)])
        self.end[:, rows] -= surplus
        self._synced[:, rows] = np.minimum(self._synced[:, rows], self.end[:, rows])
        per_row: IntArray = surplus.sum(axis=(0, 2), dtype=np.int32)
        return per_row

    def move_front(self, rows: IntArray, first: IntArray) -> None:
        """Give back the columns before ``first [rows]``; a row without others goes on there."""
        first = np.minimum(first, self.blocks.shape[3])[None, :, None]
        surplus = np.clip(first, self.first[:, rows], self.end[:, rows]) - self.first[:, rows]
        self.pool.release(self.blocks[_entries(rows, self.first[:, rows], surplus)])
        self.first[:, rows] = first
        for array in (self.end, self._synced):
            array[:, rows] = np.maximum(array[:, rows], first)

    def release_row(self, row: int) -> None:
        """Give back everything a row holds."""
        self.pool.release(self.row_entries(row)[0])
        self.start(row, 0)

    def replace_shared(self, rows: IntArray, columns: IntArray, end: IntArray) -> IntArray:
        """Put a fresh block wherever ``shared`` finds one.

        A block with more than one reference is read-only. Returns which of the n were replaced
        in some group. Contents do not move: the caller copies them.
        """
        shared = self.shared(rows, columns, end)
        at, group, head = np.nonzero(shared)
        where = (group, rows[at], head, columns[at])
        self.pool.release(self.blocks[where])
        self.blocks[where] = self.pool.allocate(len(at))
        np.minimum.at(self._synced, where[:3], columns[at])
        return np.asarray(shared.any(axis=(1, 2)))

    def row_entries(self, row: int) -> tuple[IntArray, IntArray]:
        """Blocks that a row names, group by group, and the columns they stand in."""
        first = self.first[:, [row]]
        where = _entries(np.array([row]), first, self.end[:, [row]] - first)
        return self.blocks[where], where[3]

    def held(self, num_rows: int) -> IntArray:
        """Blocks that each of the first ``num_rows`` rows names."""
        columns = self.end[:, :num_rows] - self.first[:, :num_rows]
        per_row: IntArray = columns.sum(axis=(0, 2), dtype=np.int32)
        return per_row

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        longest = int(max(self.end[:, a].max(), self.end[:, b].max()))
        self.blocks[:, [a, b], :, :longest] = self.blocks[:, [b, a], :, :longest]
        for array in (self.first, self.end, self._synced):
            array[:, [a, b]] = array[:, [b, a]]

    def take_update(self, num_rows: int) -> TableUpdate:
        """Entries set since the last call, for the first ``num_rows`` rows."""
        synced, end = self._synced[:, :num_rows], self.end[:, :num_rows]
        if (synced == end).all():
            return NO_UPDATE
        where = _entries(np.arange(num_rows), synced, end - synced)
        synced[:] = end
        return TableUpdate(np.ravel_multi_index(where, self.blocks.shape), self.blocks[where])

    def all_held(self) -> IntArray:
        """Every block named, once per naming."""
        rows = np.arange(self.end.shape[1], dtype=np.int32)
        held: IntArray = self.blocks[_entries(rows, self.first, self.end - self.first)]
        return held


def _entries(rows: IntArray, first: IntArray, counts: IntArray) -> tuple[IntArray, ...]:
    """Indices of ``counts [LG, rows, R]`` table entries (or none) from columns ``first`` on."""
    group, at, head = np.nonzero(counts > 0)
    times = counts[group, at, head]
    column = np.repeat(first[group, at, head], times) + ragged_arange(times)
    return (*(np.repeat(part, times) for part in (group, rows[at], head)), column)
