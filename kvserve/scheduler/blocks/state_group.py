"""Rows of a size that no length changes: what layers with states keep of all that a row has read.

Beside the pool, each row at the place of its number, and behind the rows those that later prompts
may begin with (``kept_states.py``): there are no blocks, and no tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec
from kvserve.scheduler.blocks.kept_states import KeptStates
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.messages.saved_row import GroupRow, SavedTable
from kvserve.scheduler.row_schema import per_row

BOUNDARY = 64
"""States are kept at multiples of so many tokens: chunks that end there give the numbers of longer
ones, where modules compute in pieces as long."""
STATE_BYTES = 4
"""Of a number of a recurrent state: transformers' modules keep them in float32."""


class LayerState(NamedTuple):
    """What one layer keeps of a row: a convolution's newest inputs ``[channels, columns]`` in the
    model's dtype, and a recurrent state of any shape in float32 (``None``: it has none)."""

    layer: int
    tail: tuple[int, int]
    recurrent: tuple[int, ...] | None

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of a row, of numbers of ``itemsize`` bytes in the model's dtype."""
        return itemsize * math.prod(self.tail) + STATE_BYTES * math.prod(self.recurrent or (0,))


class StateGroup(CacheGroup):
    """A row that leaves for host memory takes as many blocks there as its state fills. ``shared``:
    how many tokens a row's prompt had in common with earlier ones."""

    kind = "states"
    prefix_tokens = BOUNDARY
    shared: IntArray = per_row()

    def __init__(self, spec: StateSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kept: KeptStates | None = None
        """``None``: prefixes are not cached."""
        self.make_by_row(lambda fields: np.zeros((fields, spec.max_rows), np.int32))

    def start_row(self, row: int) -> None:
        self.shared[row] = 0

    def save(self, row: int) -> GroupRow:
        """The null block stands for what is in no block as long as the row is in the pool."""
        columns = np.zeros((1, 1), np.int32)
        there = SavedTable(columns, columns, np.zeros(self.spec.host_blocks, np.int32))
        return GroupRow((there,), {})

    def take_updates(self, num_rows: int) -> list[TableUpdate]:
        """None; a step's moves are taken by now."""
        if self.kept is not None:
            self.kept.step_ends()
        return []

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        return np.zeros(num_rows, np.int32)

    def counts(self, rows: Rows) -> dict[str, int]:
        return {"state_bytes": self.spec.all_bytes * len(np.arange(self.spec.max_rows)[rows])}

    def check_integrity(self) -> None:
        if self.kept is not None:
            self.kept.check_integrity()


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """Of ``max_rows`` rows and ``num_kept`` places of kept ones; ``row_bytes`` are those of one in
    all ``layers`` on each of the ``ranks``, and fill ``host_blocks`` in host memory. States are
    kept at every multiple of ``every`` tokens, among others."""

    rows = "kvserve.engine.cache.state_rows"
    layers: tuple[LayerState, ...]
    row_bytes: int
    max_rows: int
    num_kept: int = 0
    every: int = BOUNDARY
    host_blocks: int = 1
    ranks: int = 1

    @property
    def all_bytes(self) -> int:
        """Of a row on all ranks."""
        return self.row_bytes * self.ranks

    @property
    def nbytes(self) -> int:
        """Of all rows and places, on one rank."""
        return self.row_bytes * (self.max_rows + self.num_kept)

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        assert max_rows == self.max_rows
        return StateGroup(self)
