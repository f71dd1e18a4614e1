"""Codebook storage: which entries of a row are held as codes, and in which blocks.

A coded lane (one KV group of a row) holds its first entries as slots in *index blocks*, which refer
to vectors in *vector blocks*; both come from the same pool as all other blocks. Later entries are
in raw blocks, as usual, with which the lane's KV table then begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.row_schema import per_group

SLOT_BYTES = 16
"""Two references, two scales, a position and a distance; four are not used."""
MAX_VECTORS = 1 << 16
"""References have two bytes."""


class CodeGroup(CacheGroup):
    """Index and vector tables of all rows; ``coded`` entries and ``num_vectors`` of each lane.

    Both ``[LG, max_rows, R]``. ``slots_per_block`` slots fit an index block.
    """

    coded: IntArray = per_group()
    num_vectors: IntArray = per_group()

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        max_rows: int,
        max_model_len: int,
        slots_per_block: int,
    ) -> None:
        self.slots_per_block = slots_per_block
        self.vectors_per_block = 2 * layout.block_size
        lanes = layout.layer_groups, layout.rows
        self.index = BlockTable(pool, lanes, max_rows, slots_per_block, max_model_len)
        self.vectors = BlockTable(pool, lanes, max_rows, self.vectors_per_block, 2 * max_model_len)
        super().__init__(self.index, self.vectors)
        self.make_by_group(lambda: np.zeros_like(self.index.end))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.coded[:, row] = self.num_vectors[:, row] = 0

    def can_leave(self, row: int) -> bool:
        """The device keeps no counts of codes for rows that are away, so only raw ones leave."""
        return not self.coded[:, row].any()

    def counts(self, rows: Rows) -> dict[str, int]:
        coded, vectors = self.coded[:, rows].sum(), self.num_vectors[:, rows].sum()
        return {"coded_entries": int(coded), "codebook_entries": int(vectors)}


@dataclass(frozen=True)
class CodeSpec(GroupSpec):
    """Codes: ``block_tokens`` slots fit an index block."""

    rows = "kvserve.engine.cache.code_rows"

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CodeGroup:
        return CodeGroup(pool, layout, max_rows, max_model_len, self.block_tokens)
