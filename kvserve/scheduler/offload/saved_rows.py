"""Saves the blocks of rows that end, for rows that resume from them."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.blocks.cache_group import Begun, ResumeAt
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
        blocks.give_back_unused(np.array([row]), np.array([computed]))
        return SavedRow(blocks.save(row), remainder)

    def blocks_wanted(self, saved: SavedRow, hosted: bool, at: ResumeAt) -> int:
        """Blocks for ``resume``, and for the row's growth up to its target."""
        each = zip(self._blocks.groups, saved.groups, strict=True)
        return sum(group.wanted_to_resume(row, hosted, at) for group, row in each)

    def resume(self, row: int, saved: SavedRow, hosted: bool, at: ResumeAt) -> None:
        """Begin a row as a saved one. Queries logged before it begins to log are left out. A
        ``hosted`` row is copied from host memory to private blocks.
        """
        blocks = self._blocks
        blocks.start_row(row)
        blocks.remainders.load(saved.remainder, row)
        for group, held in zip(blocks.groups, saved.groups, strict=True):
            begun = group.begun(held, at)
            if begun is None:
                continue
            for table, tokens in zip(group.tables, held.tables, strict=True):
                self._begin(table, row, tokens, hosted, begun)
            group.restore_fields(row, begun.fields)

    def _begin(
        self, table: BlockTable, row: int, saved: SavedTable, hosted: bool, begun: Begun
    ) -> None:
        """A row of one table: shared blocks and copies, or private blocks with what is hosted."""
        if hosted:
            self._hosted.load(*table.load(row, saved, begun.end))
        else:
            self._copies.append(table.resume(row, saved, begun.end, begun.partial))

    def take_copies(self) -> BlockCopies:
        """Block copies that resumed rows need since the last call."""
        if not self._copies:
            return NO_COPIES
        sources, copies = (np.concatenate(each) for each in zip(*self._copies, strict=True))
        self._copies.clear()
        return BlockCopies(sources, copies)
