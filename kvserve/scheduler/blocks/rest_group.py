"""A row's rest: what its events did not keep, in fewer bits and blocks of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.row_schema import per_row


class RestGroup(CacheGroup):
    """One table for all lanes, since events keep equally many entries in each: ``rest_lens
    [max_rows]``."""

    kind = "rest"
    rest_lens: IntArray = per_row()

    def __init__(self, table: BlockTable, lanes: int) -> None:
        super().__init__(table)
        self.table, self._lanes = table, lanes
        self.make_by_row(lambda fields: np.zeros((fields, table.end.shape[1]), np.int32))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.rest_lens[row] = 0

    def missing(self, rows: IntArray, added: IntArray) -> IntArray:
        """Blocks that ``added [n]`` more entries of ``rows [n]`` take: [n]."""
        ends = -(-(self.rest_lens[rows] + added) // self.table.block_tokens)
        return np.asarray(np.maximum(ends - self.table.end[0, rows, 0], 0))

    def add(self, rows: IntArray, added: IntArray) -> None:
        """Count ``added [n]`` more entries, whose blocks are known to be free."""
        self.rest_lens[rows] += added
        self.table.extend(rows, self.rest_lens[rows][None, :, None])

    def can_leave(self, row: int) -> bool:
        """The device keeps no count of the rest of rows that are away."""
        return not self.rest_lens[row]

    def held_beside(self, rows: Rows) -> IntArray:
        held: IntArray = self.rest_lens[rows]
        return held

    def counts(self, rows: Rows) -> dict[str, int]:
        return {"rest_entries": int(self.rest_lens[rows].sum()) * self._lanes}

    def check_integrity(self) -> None:
        ends = -(-self.rest_lens // self.table.block_tokens)
        assert (ends == self.table.end[0, :, 0]).all()


@dataclass(frozen=True)
class RestSpec(GroupSpec):
    """``block_tokens`` entries of the rest fit a block; ``lanes``: KV heads of all its layers."""

    rows = "kvserve.engine.cache.rest_rows"
    lanes: int

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        """It takes fewer blocks than the same entries do among keys and values, but for one."""
        return 1

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> RestGroup:
        table = BlockTable(pool, (1, 1), max_rows, self.block_tokens, max_model_len)
        return RestGroup(table, self.lanes)
