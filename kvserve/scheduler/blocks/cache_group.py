"""Cache groups: the kinds of entries that rows hold, each in tables of its own over one pool.

A group says by which rule a row grows in its tables. All else that happens to rows is here, once:
they begin, end, change places, leave for host memory or for a later turn, and come back.
``BlockManager`` loops over the groups and asks none what it holds. A new kind of entry is a
subclass beside these, and a ``GroupSpec`` that makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.messages.saved_row import GroupRow
from kvserve.scheduler.row_schema import RowArrays, per_group, per_row
from kvserve.scheduler.triggers.trigger import NOT_LOGGING


class ResumeAt(NamedTuple):
    """Where a row resumes a saved one: without its newest ``dropped`` tokens, at ``computed``; it
    grows up to ``target`` tokens, and will log one of ``log_stride`` queries from ``log_from`` on.
    """

    dropped: int
    computed: int
    target: int
    log_from: int
    log_stride: int


class CacheGroup(RowArrays):
    """One kind of entry: ``tables`` over the pool, which an event fills unless a subclass says how
    they grow with tokens."""

    kind: ClassVar[str] = "entries"
    """What its blocks are counted as, where bytes are told by kind."""
    cached_with_prefixes: bool = False
    """Whether cached prefixes bring this group's blocks. They then hold as many tokens each as
    blocks of keys and values."""

    prefix_tokens: int = 1
    """A row may begin with cached prefixes of so many tokens, twice, three times, ... as many."""

    def __init__(self, *tables: BlockTable) -> None:
        self.tables = tables

    def start_row(self, row: int) -> None:
        """Begin an empty row."""
        for table in self.tables:
            table.start(row, 0)

    def release_row(self, row: int) -> None:
        """Give back everything a row holds."""
        for table in self.tables:
            table.release_row(row)
        self.start_row(row)

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for table in self.tables:
            table.swap(a, b)
        self.move_rows([a, b], [b, a])

    # ---- growth ------------------------------------------------------------------------------

    def missing_blocks(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        """Blocks still missing for ``new`` more tokens per row, from logical ``positions`` on."""
        return 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Allocate the blocks that ``missing_blocks`` counts."""

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
        """Blocks of a row that holds ``num_tokens`` and has logged one of ``log_stride`` queries
        from ``log_from`` on."""
        return 0

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        """Give back blocks reserved for entries behind the last one held; rows have ``computed
        [n]`` tokens."""

    def pass_by(self, positions: IntArray) -> None:
        """Give back what no token from logical ``positions [n]`` of the first rows on needs."""

    # ---- prefixes ----------------------------------------------------------------------------

    def columns(self, row: int, first: int, end: int) -> IntArray:
        """Blocks of a row's columns ``[first, end)``: ``[n, LG * R]``."""
        (table,) = self.tables
        named = table.blocks[:, row, :, first:end]
        return named.transpose(2, 0, 1).reshape(end - first, -1)

    def usable(self, columns: IntArray) -> IntArray:
        """Those of cached ``columns [n, LG * R]`` that a row can begin with: block 0 stands for one
        that it does not need."""
        return columns

    def adopt(self, row: int, columns: IntArray) -> None:
        """Begin an empty row with shared ``columns [n, LG * R]``; block 0 stands for none."""
        (table,), needed = self.tables, columns[(columns > 0).any(axis=1)]
        first = len(columns) - len(needed)
        table.start(row, first)
        table.adopt(row, needed.reshape(len(needed), *table.lanes), first)

    def begin_at(self, row: int, position: int) -> None:
        """Begin an empty row behind a cached prefix that brings none of this group's blocks."""

    # ---- rows that leave, and come back ------------------------------------------------------

    def can_leave(self, row: int) -> bool:
        """Whether a row's blocks can be moved to host memory, or saved."""
        return True

    def save(self, row: int) -> GroupRow:
        """What a row holds."""
        return GroupRow(tuple(table.save(row) for table in self.tables), self.park_row(row))

    def resumes_from(self, row: int) -> int:
        """The least tokens with which another row can resume what this one holds."""
        return 0

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        """Blocks that a row takes to resume a saved one and to grow up to its target."""
        return 0

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray | None:
        """How many entries of a saved row's tables another one resumes with: ``[LG, R]``; ``None``
        if it begins empty."""
        return None

    def resume_fields(self, row: int, saved: GroupRow, at: ResumeAt) -> None:
        """Set the fields of a row that resumes a saved one."""
        self.restore_fields(row, saved.fields)

    # ---- what others have to know ------------------------------------------------------------

    def take_updates(self, num_rows: int) -> list[TableUpdate]:
        """Table entries of the first rows that were set since the last call, table by table."""
        return [table.take_update(num_rows) for table in self.tables]

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        """Blocks that each of the first rows names."""
        return reduce(np.add, (table.blocks_of_rows(num_rows) for table in self.tables))

    def held_beside(self, rows: Rows) -> IntArray | int:
        """Entries of each of ``rows`` over the lanes of its tables, beside ``kv_lens``."""
        return 0

    def counts(self, rows: Rows) -> dict[str, int]:
        """What ``usage`` says of the entries of ``rows`` beside their number."""
        return {}

    def check_integrity(self) -> None:
        """Assert that lengths fit the tables."""


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

    def missing_blocks(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        lens = self.kv_lens[:, rows] + new[:, None]
        return self._table.missing_blocks(rows, lens) if self._holds else 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        if self._holds:
            self._table.extend(rows, self.kv_lens[:, rows] + new[:, None])

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
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


class TokenGroup(CacheGroup):
    """Something of every token from ``_from`` on, addressed by logical position: no event evicts
    it. By default of all tokens; prefixes bring it."""

    cached_with_prefixes = True
    begins: ClassVar[int] = 0
    """From which token on a new row holds something."""
    _from: IntArray = per_row()
    _stride: IntArray = per_row()
    """Of so many tokens from there on it holds the last one's."""

    def __init__(self, table: BlockTable) -> None:
        super().__init__(table)
        self._table, self.block_tokens = table, table.block_tokens
        rows = table.end.shape[1]
        self.make_by_row(lambda fields: np.full((fields, rows), self.begins, np.int32))
        self._stride[:] = 1

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self._from[row], self._stride[row] = self.begins, 1

    def missing_blocks(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        ends = self._ends(rows, positions + new)
        return self._table.missing_blocks(rows, ends) if ends.any() else 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        ends = self._ends(rows, positions + new)
        if ends.any():
            self._table.extend(rows, ends)

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
        first, stride = self._logs(log_from, log_stride)
        if num_tokens <= first:
            return 0
        columns = -(-_places(num_tokens, first, stride) // self.block_tokens)
        return int(columns - first // stride // self.block_tokens) * self._table.num_lanes

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        columns = -(-self._ends(rows, computed) // self.block_tokens)
        self._table.truncate(rows, np.maximum(columns, self._table.first[:, rows]))

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        (first, stride), wanted = self._logs(at.log_from, at.log_stride), 0
        begun = _places(max(at.computed, first), first, stride) // self.block_tokens
        if at.target > first:
            columns = -(-_places(at.target, first, stride) // self.block_tokens)
            wanted += int(columns - begun) * self._table.num_lanes
        if hosted and first < at.computed:
            wanted += int(np.maximum(begun - saved.tables[0].first, 0).sum())
        return wanted

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray | None:
        first, stride = self._logs(at.log_from, at.log_stride)
        if first >= at.computed:
            return None
        assert saved.fields["_from"] <= first, "what is wanted of earlier tokens is not there"
        return np.full(self._table.lanes, _places(at.computed, first, stride))

    def _logs(self, log_from: int, log_stride: int) -> tuple[int, int]:
        """From which token on a row that logs queries so holds something, and of how many each."""
        return self.begins, 1

    def _ends(self, rows: Rows, ends: IntArray) -> IntArray:
        """Places up to logical positions: ``[n, 1]``, 0 for rows that hold nothing."""
        first = self._from[rows]
        if not (behind := ends > first).any():
            return np.zeros_like(ends)[:, None]
        return np.where(behind, _places(ends, first, self._stride[rows]), 0)[:, None]


def _places(positions: Any, first: Any, stride: Any) -> Any:
    """Places before logical ``positions``, if of every ``stride`` from ``first`` on the last one
    has a place. Those as far apart as these have neighbouring places."""
    return first // stride + (positions - first) // stride


class LogGroup(TokenGroup):
    """Logged queries: from the position on that a trigger names, until they have scored."""

    kind = "log"
    cached_with_prefixes = False
    begins = NOT_LOGGING

    def log_from(self, rows: IntArray, positions: IntArray, stride: int = 1) -> None:
        """Log one of ``stride`` queries from logical ``positions`` on (or NOT_LOGGING); give back
        earlier ones."""
        if (self._from[rows] == positions).all():
            return
        self._table.move_front(rows, (positions // stride)[:, None] // self.block_tokens)
        self._from[rows], self._stride[rows] = positions, stride

    def logged_from(self, rows: list[int]) -> IntArray:
        """Logical positions from which rows log queries."""
        logged: IntArray = self._from[rows]
        return logged

    def is_used(self, num_rows: int) -> bool:
        """Whether any of the first ``num_rows`` rows logs queries."""
        return bool((self._from[:num_rows] < NOT_LOGGING).any())

    def _logs(self, log_from: int, log_stride: int) -> tuple[int, int]:
        return log_from, log_stride


@dataclass(frozen=True)
class GroupSpec:
    """A group beside those that every engine has: ``block_tokens`` of its entries fit a block.

    By default it holds something of every token, in one table a row. A subclass may make another
    ``CacheGroup``; what is written is the device's matter (``engine/cache/row_groups.py``).
    """

    rows: ClassVar[str] = ""
    """The file that registers its tables on the device."""
    block_tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes beside the pool."""
        return 0

    @property
    def shown(self) -> tuple[tuple[str, str, str], str] | None:
        """Its row of the start-up table, and what prefix caching goes by because of it."""
        return None

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        """Most blocks of a sequence of ``num_tokens``, beside those of keys and values."""
        return 0

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        """The group of one scheduler."""
        assert self.block_tokens == layout.block_size, "prefixes bring whole columns"
        table = BlockTable(pool, (1, 1), max_rows, self.block_tokens, max_model_len)
        return TokenGroup(table)


FURTHER: list[Callable[[KVLayout, int], GroupSpec | None]] = []
"""What packages add: the group of engines of a layout, with so many bytes a block, if they have it.
"""


def further_groups(layout: KVLayout, block_bytes: int) -> tuple[GroupSpec, ...]:
    """Those of ``FURTHER`` that an engine has."""
    found = (make(layout, block_bytes) for make in FURTHER)
    return tuple(spec for spec in found if spec is not None)


def make_groups(
    pool: BlockPool,
    layout: KVLayout,
    max_rows: int,
    max_model_len: int,
    log_block_tokens: int,
    further: Iterable[GroupSpec] = (),
) -> tuple[CacheGroup, ...]:
    """The groups of one scheduler: keys and values, logged queries, and ``further`` ones."""
    lanes = layout.layer_groups, layout.rows
    kv, log = (
        BlockTable(pool, lanes, max_rows, tokens, max_model_len)
        for tokens in (layout.block_size, log_block_tokens)
    )
    made = pool, layout, max_rows, max_model_len
    entries = EntryGroup(kv, holds=layout.holds_entries)
    return entries, LogGroup(log), *(one.make(*made) for one in further)
