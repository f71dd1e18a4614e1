"""Groups that hold something of each token: logged queries are one."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, ResumeAt
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.row_schema import per_row
from kvserve.scheduler.triggers.trigger import NOT_LOGGING


class TokenGroup(CacheGroup):
    """Something of every token from ``_from`` on, addressed by logical position: no event evicts
    it. By default of all tokens; prefixes bring it."""

    cached_with_prefixes = True
    begins: ClassVar[int] = 0
    """From which token on a new row holds something."""
    _from: IntArray = per_row()

    def __init__(self, table: BlockTable) -> None:
        super().__init__(table)
        self._table, self.block_tokens = table, table.block_tokens
        rows = table.end.shape[1]
        self.make_by_row(lambda fields: np.full((fields, rows), self.begins, np.int32))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self._from[row] = self.begins

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        ends = self._ends(rows, positions + new)
        return self._table.wanted(rows, ends) if ends.any() else 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        ends = self._ends(rows, positions + new)
        if ends.any():
            self._table.extend(rows, ends)

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        first = self._first(log_from)
        if num_tokens <= first:
            return 0
        columns = -(-num_tokens // self.block_tokens) - first // self.block_tokens
        return columns * self._table.num_lanes

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        columns = -(-computed[:, None] // self.block_tokens)
        self._table.truncate(rows, np.maximum(columns, self._table.first[:, rows]))

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        first, wanted = self._first(at.log_from), 0
        if at.target > first:
            columns = -(-at.target // self.block_tokens)
            columns -= max(at.computed, first) // self.block_tokens
            wanted += columns * self._table.num_lanes
        if hosted and first < at.computed:
            held = at.computed // self.block_tokens - saved.tables[0].first
            wanted += int(np.maximum(held, 0).sum())
        return wanted

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray | None:
        first = self._first(at.log_from)
        if first >= at.computed:
            return None
        assert saved.fields["_from"] <= first, "what is wanted of earlier tokens is not there"
        return np.full(self._table.lanes, at.computed)

    def _first(self, log_from: int) -> int:
        """From which token on a row holds something, if it logs queries from ``log_from`` on."""
        return self.begins

    def _ends(self, rows: Rows, ends: IntArray) -> IntArray:
        """Logical positions up to which rows hold something: ``[n, 1]``, 0 for those that hold
        nothing."""
        return np.where(ends > self._from[rows], ends, 0)[:, None]


class LogGroup(TokenGroup):
    """Logged queries: from the position on that a trigger names, until they have scored."""

    kind = "log"
    cached_with_prefixes = False
    begins = NOT_LOGGING

    def log_from(self, rows: IntArray, positions: IntArray) -> None:
        """Log queries from logical ``positions`` on (or NOT_LOGGING); give back earlier ones."""
        if (self._from[rows] == positions).all():
            return
        self._table.move_front(rows, positions[:, None] // self.block_tokens)
        self._from[rows] = positions

    def logged_from(self, rows: list[int]) -> IntArray:
        """Logical positions from which rows log queries."""
        logged: IntArray = self._from[rows]
        return logged

    def is_used(self, num_rows: int) -> bool:
        """Whether any of the first ``num_rows`` rows logs queries."""
        return bool((self._from[:num_rows] < NOT_LOGGING).any())

    def _first(self, log_from: int) -> int:
        return log_from
