"""Groups of some tokens alone: the newest, of layers with sliding windows; and of entries as they
were computed, beside entries in few bits, the newest and the first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec, ResumeAt, TokenGroup
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.saved_row import GroupRow


class WindowGroup(TokenGroup):
    """Keys and values of the newest tokens, addressed by logical position. A token sees ``window``
    of them, itself included; a step computes at most ``chunk`` of a row.

    Blocks behind a row's window are given back as it grows. A few tokens more are held, so that a
    later turn may leave out the last few of an answer.
    """

    kind = "windows"

    def __init__(self, table: BlockTable, spec: WindowSpec) -> None:
        super().__init__(table)
        self.spec = spec
        self._window, self._chunk = spec.window, spec.chunk

    def pass_by(self, positions: IntArray) -> None:
        """Give back what no token from ``positions [n]`` of the first rows on will see."""
        first = self._first_column(np.maximum(positions - self.spec.slack, 0))
        moved = np.flatnonzero(first > self._table.first[0, : len(first), 0])
        if len(moved):
            self._table.move_front(moved, first[moved, None])

    def held_behind(self, computed: IntArray) -> IntArray:
        """Entries that each table of a row holds where ``computed [n]`` tokens have been computed
        one by one."""
        first = self._first_column(np.maximum(computed - 1 - self.spec.slack, 0))
        held: IntArray = computed - first * self.block_tokens
        return held

    def missing_blocks(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        return super().missing_blocks(rows, np.minimum(new, self._chunk), positions)

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        super().grow(rows, np.minimum(new, self._chunk), positions)

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
        return window_blocks(num_tokens, self.spec) * self._table.num_lanes

    # ---- prefixes ----------------------------------------------------------------------------

    def columns(self, row: int, first: int, end: int) -> IntArray:
        """Block 0 stands for columns that the row has given back."""
        found = super().columns(row, first, end).copy()
        found[: max(int(self._table.first[0, row, 0]) - first, 0)] = 0
        return found

    def usable(self, columns: IntArray) -> IntArray:
        """The longest prefix whose last tokens are all there, with block 0 for what none sees."""
        ends = np.arange(len(columns) + 1)
        missing = np.concatenate([[0], np.cumsum((columns == 0).any(axis=1))])
        seen = self._first_column(ends * self.block_tokens)
        usable = columns[: int(ends[missing[ends] == missing[seen]][-1])].copy()
        usable[: int(seen[len(usable)])] = 0
        return usable

    # ---- rows that leave, and come back ------------------------------------------------------

    def resumes_from(self, row: int) -> int:
        first = int(self._table.first[0, row, 0])
        return first * self.block_tokens + self._window - 1 if first else 0

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        at = at._replace(target=min(at.target, at.computed + self._chunk))
        return super().wanted_to_resume(saved, hosted, at)

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray | None:
        seen = int(self._first_column(np.array(at.computed)))
        assert int(saved.tables[0].first.max()) <= seen, "what the next token sees is not there"
        return super().resumed_tokens(saved, at)

    def _first_column(self, positions: IntArray) -> IntArray:
        """The first column that a token at ``positions`` sees."""
        first: IntArray = np.maximum(positions - self._window + 1, 0) // self.block_tokens
        return first


@dataclass(frozen=True)
class WindowSpec(GroupSpec):
    """``num_layers`` layers of ``window`` tokens. As many of them share a table, and a block, as
    layers of the other kind do, or as ``KVLayout.windows`` says; blocks of the last table may have
    room for more."""

    rows = "kvserve.engine.cache.window_rows"
    makes: ClassVar[type[WindowGroup]] = WindowGroup
    num_layers: int
    window: int
    chunk: int

    @property
    def slack(self) -> int:
        """Tokens behind a window that are held, too."""
        return self.block_tokens

    def lanes(self, layout: KVLayout) -> tuple[int, int]:
        """Groups of layers, and tables of each."""
        own = layout.windows or layout
        return -(-self.num_layers // own.layers_per_block), own.rows

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        return window_blocks(num_tokens, self) * math.prod(self.lanes(layout))

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        lanes = self.lanes(layout)
        table = BlockTable(pool, lanes, max_rows, self.block_tokens, max_model_len)
        return self.makes(table, self)


def window_blocks(num_tokens: int, spec: WindowSpec) -> int:
    """Most blocks of a table of ``num_tokens``: a window, what a step adds, and what is not yet
    given back."""
    most = -(-(spec.window + spec.chunk + spec.slack) // spec.block_tokens) + 1
    return min(-(-num_tokens // spec.block_tokens), most)


class NewestGroup(WindowGroup):
    """Entries from a row's last multiple of ``window`` tokens on, addressed by logical position.

    Which entries a token reads so must not depend on what other sequences have computed. Therefore
    a cached prefix ends at such a multiple: a token behind it needs none from before it.
    """

    kind = "newest"
    cached_with_prefixes = False

    def __init__(self, table: BlockTable, spec: WindowSpec) -> None:
        super().__init__(table, spec)
        self.prefix_tokens = spec.window

    def begin_at(self, row: int, position: int) -> None:
        self._table.start(row, position // self.block_tokens)

    def resumes_from(self, row: int) -> int:
        first = int(self._table.first[0, row, 0]) * self.block_tokens
        return -(-first // self._window) * self._window

    def _first_column(self, positions: IntArray) -> IntArray:
        first: IntArray = positions // self._window * self._window // self.block_tokens
        return first


@dataclass(frozen=True)
class NewestSpec(WindowSpec):
    """Of all layers: those of the layout, then ``num_layers`` with sliding windows, in tables of
    their own. ``window`` is a multiple of the layout's block size."""

    makes = NewestGroup
    left_out: int = 16
    """Newest tokens of an answer that a later turn may leave out."""

    @property
    def slack(self) -> int:
        return self.left_out

    def lanes(self, layout: KVLayout) -> tuple[int, int]:
        windowed, rows = super().lanes(layout)
        return layout.layer_groups * layout.holds_entries + windowed, rows


class FirstGroup(TokenGroup):
    """A row's first entries as they were computed, as many as a block holds: nearly all later
    tokens look at the first one. Prefixes bring them with their first column."""

    kind = "first"

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
        return self._table.num_lanes * (num_tokens > 0)

    def columns(self, row: int, first: int, end: int) -> IntArray:
        """Block 0 stands for nothing."""
        found = np.zeros((end - first, self._table.num_lanes), np.int32)
        if first == 0:
            found[:1] = self._table.blocks[:, row, :, 0].reshape(-1)
        return found

    def usable(self, columns: IntArray) -> IntArray:
        return columns

    def adopt(self, row: int, columns: IntArray) -> None:
        self._table.adopt(row, columns[:1].reshape(-1, *self._table.lanes))

    def wanted_to_resume(self, saved: GroupRow, hosted: bool, at: ResumeAt) -> int:
        shared = 0 if hosted else min(at.computed, self.block_tokens) // self.block_tokens
        return ((at.target > 0) - shared) * self._table.num_lanes

    def resumed_tokens(self, saved: GroupRow, at: ResumeAt) -> IntArray | None:
        return np.full(self._table.lanes, min(at.computed, self.block_tokens))

    def _ends(self, rows: Rows, ends: IntArray) -> IntArray:
        ends = np.minimum(super()._ends(rows, ends), self.block_tokens)
        return ends


@dataclass(frozen=True)
class FirstSpec(GroupSpec):
    """Of the layers that see all tokens."""

    rows = "kvserve.engine.cache.window_rows"

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        return layout.groups * layout.holds_entries

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        lanes = layout.layer_groups * layout.holds_entries, layout.rows
        table = BlockTable(pool, lanes, max_rows, self.block_tokens, self.block_tokens)
        return FirstGroup(table)
