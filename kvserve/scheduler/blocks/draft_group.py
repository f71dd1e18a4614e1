"""The group of a draft model's keys and values: of confirmed tokens, as many as it has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.blocks.cache_group import CacheGroup
from kvserve.scheduler.blocks.group_spec import GroupSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.row_schema import per_row


class DraftBound(NamedTuple):
    """A row keeps its first ``front`` blocks and its newest ones, ``most`` in all, whenever it
    begins to read more."""

    front: int
    most: int


class DraftGroup(CacheGroup):
    """A draft model's entries of the first ``lens [rows]`` tokens of each row, without the
    ``dropped [rows]`` ones behind the sinks that a bounded row has lost, whole blocks of them.

    They grow when the draft model reads tokens, not with the row. No answer needs them: they go
    when blocks run out or the row leaves, and are computed again. Prefixes do not bring them.
    """

    kind = "draft"
    lens: IntArray = per_row()
    dropped: IntArray = per_row()

    def __init__(self, table: BlockTable, bound: DraftBound | None = None) -> None:
        super().__init__(table)
        self._table, self.block_tokens, self.bound = table, table.block_tokens, bound
        rows = table.end.shape[1]
        self.make_by_row(lambda fields: np.zeros((fields, rows), np.int32))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.lens[row] = self.dropped[row] = 0

    def missing(self, rows: IntArray, ends: IntArray) -> int:
        """Blocks missing for the entries of ``rows [n]`` before the positions ``ends [n]``."""
        return self._table.wanted(rows, (ends - self.dropped[rows])[:, None])

    def make_room(self, rows: IntArray) -> None:
        """Drop what ``rows [n]`` hold beyond their bound, the oldest blocks behind the sinks."""
        if self.bound is None:
            return
        front, most = self.bound
        columns = -(-(self.lens[rows] - self.dropped[rows]) // self.block_tokens)
        for at in np.flatnonzero(columns > most).tolist():
            row, over = int(rows[at]), int(columns[at]) - most
            kept = np.delete(np.arange(columns[at]), slice(front, front + over))
            self._table.keep(row, np.broadcast_to(kept, (*self._table.lanes, most)))
            self.dropped[row] += over * self.block_tokens

    def read(self, rows: IntArray, tokens: IntArray, ends: IntArray) -> None:
        """``rows [n]`` have read their first ``tokens [n]`` tokens, and get the blocks up to the
        positions ``ends [n]``, for what they guess."""
        self._table.extend(rows, (ends - self.dropped[rows])[:, None])
        self.lens[rows] = tokens

    def confirm(self, rows: IntArray, right: IntArray) -> None:
        """``right [n]`` of the guessed tokens whose entries ``rows [n]`` hold are confirmed; the
        blocks of the others go back."""
        self.lens[rows] += right
        self._cut(rows)

    def drop_spare(self, rows: IntArray) -> int:
        self.lens[rows] = self.dropped[rows] = 0
        return self._cut(rows)

    def check_integrity(self) -> None:
        held = self.lens - self.dropped
        assert (held[:, None] <= self._table.end * self.block_tokens).all()
        assert (self.dropped[held > 0] % self.block_tokens == 0).all()

    def _cut(self, rows: IntArray) -> int:
        """Give back the blocks of ``rows`` behind their last entries; return how many."""
        columns = -(-(self.lens[rows] - self.dropped[rows]) // self.block_tokens)
        return int(self._table.truncate(rows, columns[:, None]).sum())


@dataclass(frozen=True)
class DraftSpec(GroupSpec):
    """A draft model's entries: a row has ``layer_groups * tables`` lanes."""

    layer_groups: int
    tables: int
    bound: DraftBound | None = None

    @property
    def front_tokens(self) -> int:
        """The first tokens of a row, which a bounded one keeps."""
        return 0 if self.bound is None else self.bound.front * self.block_tokens

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        if self.bound is not None:
            num_tokens = min(num_tokens, (self.bound.most + 1) * self.block_tokens)
        return -(-num_tokens // self.block_tokens) * self.layer_groups * self.tables

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        lanes = self.layer_groups, self.tables
        table = BlockTable(pool, lanes, max_rows, self.block_tokens, max_model_len)
        return DraftGroup(table, self.bound)
