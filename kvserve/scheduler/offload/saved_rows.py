"""Saves the blocks of rows that end, for rows that resume from them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.messages.continuation import SavedRow, SavedTable
from kvserve.scheduler.messages.output import NO_COPIES, BlockCopies
from kvserve.scheduler.offload.hosted_rows import HostedRows


class SavedRows:
    """Saves rows by reference, and resumes new rows from them.

    A resumed row shares all full blocks. It writes more entries to the others, so it gets copies of
    those: at most one for each lane, and one for each lane's log.
    """

    def __init__(self, blocks: BlockManager, hosted: HostedRows) -> None:
        self._blocks = blocks
        self._hosted = hosted
        self._copies: list[tuple[IntArray, IntArray]] = []

    def save(self, row: int, computed: int, remainder: int) -> SavedRow:
        """Save what a row of ``computed`` tokens holds; its remainder has gone to a place."""
        blocks = self._blocks
        blocks.give_back_unused(row, computed)
        return SavedRow(blocks.kv.save(row), blocks.log.save(row), blocks.park_row(row), remainder)

    def blocks_wanted(
        self, saved: SavedRow, hosted: bool, dropped: int, computed: int, target: int, log_from: int
    ) -> int:
        """Blocks for ``resume``, and for the row's growth up to ``target`` tokens."""
        size, log_size = self._blocks.layout.block_size, self._blocks.log_block_tokens
        lens, groups = saved.lengths["kv_lens"] - dropped, self._blocks.layout.groups
        wanted = int((-(-(lens + target - computed) // size)).sum())
        wanted -= 0 if hosted else int((lens // size).sum())
        if target > log_from:
            columns = -(-target // log_size) - max(computed, log_from) // log_size
            wanted += columns * groups
        if hosted and log_from < computed:
            logged = computed // log_size - saved.log.first
            wanted += int(np.maximum(logged, 0).sum())
        return wanted

    def resume(
        self,
        row: int,
        saved: SavedRow,
        hosted: bool,
        dropped: int,
        computed: int,
        log_from: int,
    ) -> None:
        """Begin a row as a saved one without its newest ``dropped`` tokens, at ``computed``.

        It will log queries from ``log_from`` on; queries logged before that are left out. A
        ``hosted`` row is copied from host memory to private blocks.
        """
        blocks = self._blocks
        blocks.start_row(row)
        blocks.remainders.load(saved.remainder, row)
        lens, size = saved.lengths["kv_lens"] - dropped, blocks.layout.block_size
        self._begin(blocks.kv, row, saved.kv, hosted, -(-lens // size), lens % size > 0)
        fields = {**saved.lengths, "kv_lens": lens}
        if log_from < computed:
            assert saved.lengths["_log_from"] <= log_from, "queries are wanted that nobody logged"
            size = blocks.log_block_tokens
            end = np.full_like(lens, -(-computed // size))
            partial = np.full_like(lens, computed % size > 0, bool)
            self._begin(blocks.log, row, saved.log, hosted, end, partial)
        else:
            del fields["_log_from"]  # nothing is logged yet
        blocks.restore_fields(row, fields)

    def _begin(
        self,
        table: BlockTable,
        row: int,
        saved: SavedTable,
        hosted: bool,
        end: IntArray,
        partial: NDArray[np.bool_],
    ) -> None:
        """A row of one table: shared blocks and copies, or private blocks with what is hosted."""
        if hosted:
            self._hosted.load(*table.load(row, saved, end))
        else:
            self._copies.append(table.resume(row, saved, end, partial))

    def take_copies(self) -> BlockCopies:
        """Block copies that resumed rows need since the last call."""
        if not self._copies:
            return NO_COPIES
        sources, copies = (np.concatenate(each) for each in zip(*self._copies, strict=True))
        self._copies.clear()
        return BlockCopies(sources, copies)
