"""The group of keys and values."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import Begun, CacheGroup, ResumeAt
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.row_schema import per_group


class EntryGroup(CacheGroup):
    """Keys and values, addressed by a row's physical length ``kv_lens``, which events lower."""

    cached_with_prefixes = True
    kv_lens: IntArray = per_group()

    def __init__(self, table: BlockTable, block_size: int) -> None:
        super().__init__(table)
        self._table, self._size = table, block_size
        self.make_by_group(lambda: np.zeros_like(table.end))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.kv_lens[:, row] = 0

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        return self._table.wanted(rows, self.kv_lens[:, rows] + new[:, None])

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        self._table.extend(rows, self.kv_lens[:, rows] + new[:, None])

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        return -(-num_tokens // self._size) * self._table.num_lanes

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        self._table.truncate(rows, -(-self.kv_lens[:, rows] // self._size))

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        lens = saved.fields["kv_lens"] - at.dropped
        wanted = -(-(lens + at.target - at.computed) // self._size)
        return int((wanted if hosted else wanted - lens // self._size).sum())

    def begun(self, saved: GroupRow, at: ResumeAt) -> Begun:
        lens = saved.fields["kv_lens"] - at.dropped
        return Begun(-(-lens // self._size), lens % self._size > 0, {"kv_lens": lens})

    def check_integrity(self) -> None:
        assert (self.kv_lens <= self._table.end * self._size).all()


class NoEntries(EntryGroup):
    """That of a model without a layer that sees all tokens: it counts them and has no blocks."""

    cached_with_prefixes = False

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        return 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Nothing is held."""

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        return 0

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        return 0

    def begun(self, saved: GroupRow, at: ResumeAt) -> Begun:
        none = np.zeros_like(saved.fields["kv_lens"])
        return Begun(none, none > 0, {"kv_lens": saved.fields["kv_lens"] - at.dropped})

    def check_integrity(self) -> None:
        assert not self._table.end.any()
