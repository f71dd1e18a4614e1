"""The group of keys and values."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, ResumeAt
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.row_schema import per_group


class EntryGroup(CacheGroup):
    """Keys and values, addressed by a row's physical length ``kv_lens``, which events lower.

    That of a model without a layer that sees all tokens counts entries, but ``holds`` none.
    """

    kv_lens: IntArray = per_group()

    def __init__(self, table: BlockTable, *, holds: bool = True) -> None:
        super().__init__(table)
        self._table, self._size = table, table.block_tokens
        self._holds = self.cached_with_prefixes = holds
        self.make_by_group(lambda: np.zeros_like(table.end))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.kv_lens[:, row] = 0

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        lens = self.kv_lens[:, rows] + new[:, None]
        return self._table.wanted(rows, lens) if self._holds else 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        if self._holds:
            self._table.extend(rows, self.kv_lens[:, rows] + new[:, None])

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        return -(-num_tokens // self._size) * self._table.num_lanes * self._holds

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        self._table.truncate(rows, -(-self.kv_lens[:, rows] // self._size))

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        lens = saved.fields["kv_lens"] - at.dropped
        wanted = -(-(lens + at.target - at.computed) // self._size)
        return int((wanted if hosted else wanted - lens // self._size).sum()) * self._holds

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray:
        return np.asarray(saved.fields["kv_lens"] - at.dropped) * self._holds

    def resume_fields(self, row: int, saved: GroupRow, at: ResumeAt) -> None:
        self.kv_lens[:, row] = saved.fields["kv_lens"] - at.dropped

    def check_integrity(self) -> None:
        end = self._table.end
        assert (self.kv_lens <= end * self._size).all() if self._holds else not end.any()
