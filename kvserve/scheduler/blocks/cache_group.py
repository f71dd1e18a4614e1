"""Cache groups: the kinds of entries that rows hold, each in tables of its own over one pool.

A group says by which rule a row grows in its tables. All else that happens to rows is here, once:
they begin, end, change places, leave for host memory or for a later turn, and come back.
``BlockManager`` loops over the groups and asks none what it holds. A new kind of entry is a
subclass beside these, and a ``GroupSpec`` that makes it.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.row_schema import RowArrays


class ResumeAt(NamedTuple):
    """Where a row resumes a saved one: without its newest ``dropped`` tokens, at ``computed``; it
    grows up to ``target`` tokens, and will log queries from ``log_from`` on."""

    dropped: int
    computed: int
    target: int
    log_from: int


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

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        """Blocks still missing for ``new`` more tokens per row, from logical ``positions`` on."""
        return 0

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Allocate the blocks that ``wanted`` counts."""

    def blocks_alone(self, num_tokens: int, log_from: int) -> int:
        """Blocks of a row that holds ``num_tokens`` and has logged queries from ``log_from`` on."""
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
