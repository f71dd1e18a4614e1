"""Block tables of all rows and KV groups, in vectorised numpy.

A row holds columns ``[first, end)`` of its table. The KV table gives its front back if entries
there become codes. The query log's table is addressed by logical position, and gives its front back
once those queries have scored. Letters: LG layer groups, R tables per row, M columns. A lane is one
group of one row, numbered as in ``[LG, max_rows, R]``.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.messages.saved_row import SavedTable
from kvserve.scheduler.row_schema import RowArrays, per_group

Rows = IntArray | slice
"""Row numbers, or a slice of rows, which costs no copy."""
NO_UPDATE = TableUpdate(np.zeros(0, np.int64), np.zeros(0, np.int32))


class BlockTable(RowArrays):
    """``blocks [LG, max_rows, R, M]`` with ``first`` and ``end`` ``[LG, max_rows, R]``."""

    first: IntArray = per_group()
    end: IntArray = per_group()
    _synced: IntArray = per_group()
    """The runner has seen the entries before this column."""

    def __init__(
        self,
        pool: BlockPool,
        lanes: tuple[int, int],
        max_rows: int,
        block_tokens: int,
        max_tokens: int,
    ) -> None:
        """``lanes``: LG and R."""
        self.pool, self.lanes, self.block_tokens = pool, lanes, block_tokens
        self.num_lanes = lanes[0] * lanes[1]
        shape, columns = (lanes[0], max_rows, lanes[1]), -(-max_tokens // block_tokens)
        self.blocks: IntArray = np.zeros((*shape, columns), np.int32)
        self.make_by_group(lambda: np.zeros(shape, np.int32))
        self._lanes: IntArray = np.arange(self.end.size).reshape(shape)

    def start(self, row: int, column: int) -> None:
        """Begin an empty row whose first block will be in ``column``."""
        self.first[:, row] = self.end[:, row] = self._synced[:, row] = column

    def missing_blocks(self, rows: Rows, tokens: IntArray) -> int:
        """Blocks missing for ``tokens [LG, rows, R]`` (or what broadcasts to it) of each row."""
        return int(self._missing(rows, tokens)[1].sum())

    def extend(self, rows: Rows, tokens: IntArray) -> None:
        """Allocate the missing blocks; the caller has checked that they are free."""
        lanes, missing = self._missing(rows, tokens)
        if len(lanes):
            end = self.end.reshape(-1)
            at = self._places(lanes, end[lanes], missing)
            self.blocks.reshape(-1)[at] = self.pool.allocate(len(at))
            end[lanes] += missing

    def adopt(self, row: int, columns: IntArray, first: int = 0) -> None:
        """Begin an empty row with shared ``columns [n, LG, R]``, one more reference each, from
        column ``first`` on."""
        self.pool.share(columns.ravel())
        end = first + len(columns)
        self.blocks[:, row, :, first:end] = columns.transpose(1, 2, 0)
        self.end[:, row] = end

    def is_shared(self, rows: IntArray, columns: IntArray, end: IntArray) -> IntArray:
        """Which blocks in ``columns [n]`` of ``rows [n]`` have more than one reference.

        bool ``[n, LG, R]``; only columns before each group's ``end [LG, n, R]`` count.
        """
        named = self.blocks[:, rows, :, columns]
        inside = columns[:, None, None] < end.transpose(1, 0, 2)
        return np.asarray((self.pool.ref[named] > 1) & inside)

    def keep(self, row: int, columns: IntArray) -> int:
        """Keep only ``columns [LG, R, K]`` of a row, in this order; return the blocks released."""
        named = self.row_blocks(row)
        kept = np.take_along_axis(self.blocks[:, row], columns, axis=2)
        self.pool.share(kept.ravel())
        self.pool.release(named)
        self.blocks[:, row, :, : columns.shape[2]] = kept
        self.end[:, row] = columns.shape[2]
        self._synced[:, row] = 0
        return len(named) - kept.size

    def truncate(self, rows: IntArray, end: IntArray) -> IntArray:
        """Give back the columns from ``end [LG, rows, R]`` on; return how many of each row."""
        surplus = np.maximum(self.end[:, rows] - end, 0)
        self.end[:, rows] -= surplus
        self.pool.release(self._blocks_between(rows, self.end[:, rows], surplus))
        self._synced[:, rows] = np.minimum(self._synced[:, rows], self.end[:, rows])
        per_row: IntArray = surplus.sum(axis=(0, 2), dtype=np.int32)
        return per_row

    def move_front(self, rows: IntArray, first: IntArray) -> None:
        """Give back the columns before ``first [LG, rows, R]`` (or what broadcasts to it); a row
        without later columns continues there, even if it was empty further on."""
        first = np.minimum(first, self.blocks.shape[3])
        before, empty = self.first[:, rows], self.first[:, rows] >= self.end[:, rows]
        surplus = np.clip(first, before, self.end[:, rows]) - before
        self.pool.release(self._blocks_between(rows, before, surplus))
        self.first[:, rows] = first
        for array in (self.end, self._synced):
            array[:, rows] = np.where(empty, first, np.maximum(array[:, rows], first))

    def release_row(self, row: int) -> None:
        """Give back everything a row holds."""
        self.pool.release(self.row_blocks(row))
        self.start(row, 0)

    def replace_shared(self, rows: IntArray, columns: IntArray, end: IntArray) -> IntArray:
        """Replace each block that ``is_shared`` finds with a fresh one.

        A block with more than one reference is read-only. Returns which of the n were replaced
        in some group. Contents do not move: the caller copies them.
        """
        shared = self.is_shared(rows, columns, end)
        at, group, head = np.nonzero(shared)
        where = (group, rows[at], head, columns[at])
        # First taken, then released. All rows may let go of a block here, so that it comes free:
        # as one row's new block it would be written while another row's event still reads it.
        fresh = self.pool.allocate(len(at))
        self.pool.release(self.blocks[where])
        self.blocks[where] = fresh
        np.minimum.at(self._synced, where[:3], columns[at])
        return np.asarray(shared.any(axis=(1, 2)))

    def save(self, row: int) -> SavedTable:
        """The blocks that a row names, for ``resume``."""
        named = self.row_blocks(row)
        return SavedTable(self.first[:, row].copy(), self.end[:, row].copy(), named)

    def resume(
        self,
        row: int,
        saved: SavedTable,
        tokens: IntArray,
        own_from: IntArray,
        columns: IntArray | None,
    ) -> tuple[IntArray, IntArray]:
        """Begin an empty row with the blocks of a saved one for its first ``tokens [LG, R]``, of
        which the first may be ``columns [n, LG * R]`` instead.

        Those before column ``own_from [LG, R]`` are shared. For the others the row gets private
        ones. Returns the saved and the private blocks of these, for the contents to be copied.
        """
        lanes, first, tables = self._lanes[:, row].ravel(), saved.first, self.blocks.reshape(-1)
        tables[self._places(lanes, first.ravel(), (saved.end - first).ravel())] = saved.blocks
        if columns is not None:
            self.blocks[:, row, :, : len(columns)] = columns.T.reshape(*self.lanes, -1)
        end = np.maximum(-(-tokens // self.block_tokens), first)
        self.first[:, row], self._synced[:, row], self.end[:, row] = first, first, end
        own_from = np.clip(own_from, first, end)
        self.pool.share(tables[self._places(lanes, first.ravel(), (own_from - first).ravel())])
        at = self._places(lanes, own_from.ravel(), (end - own_from).ravel())
        theirs, own = tables[at], self.pool.allocate(len(at))
        tables[at] = own
        return theirs, own

    def row_blocks(self, row: int) -> IntArray:
        """Blocks that a row names, group by group."""
        first, end = self.first[:, row].ravel(), self.end[:, row].ravel()
        at = self._places(self._lanes[:, row].ravel(), first, end - first)
        return np.asarray(self.blocks.reshape(-1)[at])

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        """Blocks that each of the first ``num_rows`` rows names."""
        columns = self.end[:, :num_rows] - self.first[:, :num_rows]
        # One axis after the other: numpy adds long rows faster than short columns.
        per_row: IntArray = columns.sum(axis=0, dtype=np.int32).sum(axis=1, dtype=np.int32)
        return per_row

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        longest = int(max(self.end[:, a].max(), self.end[:, b].max()))
        self.blocks[:, [a, b], :, :longest] = self.blocks[:, [b, a], :, :longest]
        self.move_rows([a, b], [b, a])

    def take_update(self, num_rows: int) -> TableUpdate:
        """Entries set since the last call, for the first ``num_rows`` rows."""
        behind = np.flatnonzero(self._synced[:, :num_rows] != self.end[:, :num_rows])
        if not len(behind):
            return NO_UPDATE
        lanes = self._lanes[:, :num_rows].reshape(-1)[behind]
        synced, end = self._synced.reshape(-1), self.end.reshape(-1)[lanes]
        at = self._places(lanes, synced[lanes], end - synced[lanes])
        synced[lanes] = end
        return TableUpdate(at, self.blocks.reshape(-1)[at])

    def named_by_row(self, num_rows: int) -> tuple[IntArray, IntArray]:
        """Every block that the first rows name, once per reference, and the row of each."""
        rows = slice(num_rows)
        counts = self.end[:, rows] - self.first[:, rows]
        owner = np.broadcast_to(np.arange(num_rows)[:, None], counts.shape)
        named = self._blocks_between(rows, self.first[:, rows], counts)
        return named, np.repeat(owner.ravel(), counts.ravel())

    def _missing(self, rows: Rows, tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Lanes that lack blocks for ``tokens``, and how many; all others cost one comparison."""
        short = np.flatnonzero(tokens > self.end[:, rows] * self.block_tokens)
        lanes = self._lanes[:, rows].reshape(-1)[short]
        if not len(short):
            return lanes, lanes
        wanted = np.broadcast_to(tokens, self.end[:, rows].shape).reshape(-1)[short]
        return lanes, -(-wanted // self.block_tokens) - self.end.reshape(-1)[lanes]

    def _blocks_between(self, rows: Rows, first: IntArray, counts: IntArray) -> IntArray:
        """Blocks in ``counts [LG, rows, R]`` columns (or none) from ``first`` on."""
        some = np.flatnonzero(counts > 0)
        lanes, first, counts = (x.reshape(-1)[some] for x in (self._lanes[:, rows], first, counts))
        return np.asarray(self.blocks.reshape(-1)[self._places(lanes, first, counts)])

    def _places(self, lanes: IntArray, first: IntArray, counts: IntArray) -> IntArray:
        """Flat indices into ``blocks``: ``counts`` columns of each lane, from ``first`` on."""
        starts: IntArray = lanes * self.blocks.shape[3] + first
        if (counts == 1).all():
            return starts  # as in most decoding steps
        places: IntArray = np.repeat(starts, counts) + ragged_arange(counts)
        return places
