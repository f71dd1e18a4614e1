"""Cache groups: the kinds of entries that rows hold, each in tables of its own over one pool.

A group says by which rule a row grows in its tables. All else that happens to rows is here, once:
they begin, end, change places, leave for host memory or for a later turn, and come back.
``BlockManager`` loops over the groups and asks none what it holds. A new kind of entry is a
subclass beside these, and a ``GroupSpec`` that makes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.row_schema import RowArrays, per_group, per_row
from kvserve.scheduler.triggers.trigger import NOT_LOGGING


class ResumeAt(NamedTuple):
    """Where a row resumes a saved one: without its newest ``dropped`` tokens, at ``computed``; it
    grows up to ``target`` tokens, and will log queries from ``log_from`` on."""

    dropped: int
    computed: int
    target: int
    log_from: int


class Begun(NamedTuple):
    """The columns before ``end [LG, R]`` with which a resumed row begins; whether it writes more
    entries to the last one (``partial``), and its ``fields``."""

    end: IntArray
    partial: NDArray[np.bool_]
    fields: dict[str, IntArray]


class CacheGroup(RowArrays):
    """One kind of entry: ``tables`` over the pool, which an event fills unless a subclass says how
    they grow with tokens."""

    cached_with_prefixes: ClassVar[bool] = False
    """Whether cached prefixes bring this group's blocks. They then hold as many tokens each as
    blocks of keys and values."""

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

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        """Blocks still missing for ``new`` more tokens per row, from logical ``positions`` on."""
        return 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Allocate the blocks that ``wanted`` counts."""

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        """Blocks of a row that holds ``num_tokens`` and has logged queries from ``log_from`` on."""
        return 0

    def give_back_unused(self, row: int, computed: int) -> None:
        """Give back blocks reserved for entries behind the last one held."""

    # ---- prefixes ----------------------------------------------------------------------------

    def columns(self, row: int, first: int, end: int) -> IntArray:
        """Blocks of a row's columns ``[first, end)``: ``[n, LG * R]``."""
        (table,) = self.tables
        named = table.blocks[:, row, :, first:end]
        return named.transpose(2, 0, 1).reshape(end - first, -1)

    def adopt(self, row: int, columns: IntArray) -> None:
        """Begin an empty row with shared ``columns [n, LG * R]``."""
        (table,) = self.tables
        table.adopt(row, columns.reshape(len(columns), *table.lanes))

    # ---- rows that leave, and come back ------------------------------------------------------

    def can_leave(self, row: int) -> bool:
        """Whether a row's blocks can be moved to host memory, or saved."""
        return True

    def named(self, row: int) -> IntArray:
        """Every block that a row names."""
        return np.concatenate([table.row_entries(row)[0] for table in self.tables])

    def save(self, row: int) -> GroupRow:
        """What a row holds, for ``come_back`` or ``resume``."""
        return GroupRow(tuple(table.save(row) for table in self.tables), self.park_row(row))

    def wanted_to_return(self, saved: GroupRow, reserve: int) -> int:
        """Blocks that a parked row needs to come back and grow by ``reserve`` tokens."""
        return sum(int((table.end - table.first).sum()) for table in saved.tables)

    def come_back(self, row: int, saved: GroupRow, num_cached: int) -> tuple[IntArray, IntArray]:
        """Give a row that has begun fresh blocks for all it held behind ``num_cached`` columns.

        Returns these blocks, and which of all that it names they are, as a mask.
        """
        blocks, fresh = [], []
        for table, held in zip(self.tables, saved.tables, strict=True):
            table.refill(row, held.first, held.end)
            named, columns = table.row_entries(row)
            new = columns >= (num_cached if self.cached_with_prefixes else 0)
            blocks.append(named[new])
            fresh.append(new)
        self.restore_fields(row, saved.fields)
        return np.concatenate(blocks), np.concatenate(fresh)

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        """Blocks that a row takes to resume a saved one and to grow up to its target."""
        return 0

    def begun(self, saved: GroupRow, at: ResumeAt) -> Begun | None:
        """With what a row resumes; ``None`` if it begins empty."""
        return None

    # ---- what others have to know ------------------------------------------------------------

    def take_updates(self, num_rows: int) -> list[TableUpdate]:
        """Table entries of the first rows that were set since the last call, table by table."""
        return [table.take_update(num_rows) for table in self.tables]

    def to_rebuild(self, scheduled: IntArray) -> tuple[int, ...]:
        """Entries of the ``scheduled`` rows that a forward rebuilds, by layer; mostly none."""
        return ()

    def held(self, num_rows: int) -> IntArray:
        """Blocks that each of the first rows names."""
        held = self.tables[0].held(num_rows)
        for table in self.tables[1:]:
            held = held + table.held(num_rows)
        return held

    def counts(self, rows: Rows) -> dict[str, int]:
        """What ``usage`` says of the entries of ``rows`` beside their number."""
        return {}

    def check_integrity(self) -> None:
        """Assert that lengths fit the tables."""


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

    def give_back_unused(self, row: int, computed: int) -> None:
        at = np.array([row])
        self._table.truncate(at, -(-self.kv_lens[:, at] // self._size))

    def adopt(self, row: int, columns: IntArray) -> None:
        super().adopt(row, columns)
        self.kv_lens[:, row] = len(columns) * self._size

    def wanted_to_return(self, saved: GroupRow, reserve: int) -> int:
        return int((-(-(saved.fields["kv_lens"] + reserve) // self._size)).sum())

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        lens = saved.fields["kv_lens"] - at.dropped
        wanted = -(-(lens + at.target - at.computed) // self._size)
        return int((wanted if hosted else wanted - lens // self._size).sum())

    def begun(self, saved: GroupRow, at: ResumeAt) -> Begun:
        lens = saved.fields["kv_lens"] - at.dropped
        return Begun(-(-lens // self._size), lens % self._size > 0, {"kv_lens": lens})

    def check_integrity(self) -> None:
        assert (self.kv_lens <= self._table.end * self._size).all()


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

    def give_back_unused(self, row: int, computed: int) -> None:
        at, first = np.array([row]), self._table.first
        self._table.truncate(at, np.maximum(-(-computed // self.block_tokens), first[:, at]))

    def wanted_to_return(self, saved: GroupRow, reserve: int) -> int:
        more = -(-reserve // self.block_tokens) * self._table.num_lanes
        return super().wanted_to_return(saved, reserve) + more

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

    def begun(self, saved: GroupRow, at: ResumeAt) -> Begun | None:
        first = self._first(at.log_from)
        if first >= at.computed:
            return None
        assert saved.fields["_from"] <= first, "what is wanted of earlier tokens is not there"
        shape = saved.tables[0].end.shape
        end = np.full(shape, -(-at.computed // self.block_tokens))
        return Begun(end, np.full(shape, at.computed % self.block_tokens > 0), saved.fields)

    def _first(self, log_from: int) -> int:
        """From which token on a row holds something, if it logs queries from ``log_from`` on."""
        return self.begins

    def _ends(self, rows: Rows, ends: IntArray) -> IntArray:
        """Logical positions up to which rows hold something: ``[n, 1]``, 0 for those that hold
        nothing."""
        return np.where(ends > self._from[rows], ends, 0)[:, None]


class LogGroup(TokenGroup):
    """Logged queries: from the position on that a trigger names, until they have scored."""

    cached_with_prefixes = False
    begins = NOT_LOGGING

    def wanted_to_return(self, saved: GroupRow, reserve: int) -> int:
        return CacheGroup.wanted_to_return(self, saved, 0)  # its front is given back meanwhile

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


@dataclass(frozen=True)
class GroupSpec:
    """A group beside those that every engine has: ``block_tokens`` of its entries fit a block.

    By default it holds something of every token, in one table a row. A subclass may make another
    ``CacheGroup``; what is written is the device's matter (``engine/cache/row_groups.py``).
    """

    block_tokens: int

    @property
    def rebuilds(self) -> bool:
        """Whether entries are rebuilt in each step, so that it cannot be captured as a graph."""
        return False

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        """The group of one scheduler."""
        assert self.block_tokens == layout.block_size, "prefixes bring whole columns"
        table = BlockTable(pool, (1, 1), max_rows, self.block_tokens, max_model_len)
        return TokenGroup(table)


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
    return EntryGroup(kv, layout.block_size), LogGroup(log), *(one.make(*made) for one in further)
