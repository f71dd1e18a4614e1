"""Rows of a size that no length changes: what layers with states keep of all that a row has read.

Beside the pool, each row at the place of its number: there are no blocks, and no tables.
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
from kvserve.scheduler.layout import KVLayout

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
    """Its rows are on the device alone. A row that is preempted is computed again: nothing of it
    leaves for host memory."""

    kind = "states"

    def __init__(self, row_bytes: int, max_rows: int) -> None:
        super().__init__()
        self._row_bytes, self._max_rows = row_bytes, max_rows

    def can_leave(self, row: int) -> bool:
        return False

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        return np.zeros(num_rows, np.int32)

    def counts(self, rows: Rows) -> dict[str, int]:
        return {"state_bytes": self._row_bytes * len(np.arange(self._max_rows)[rows])}


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """Of ``max_rows`` rows; ``row_bytes`` are those of one in all ``layers``."""

    rows = "kvserve.engine.cache.state_rows"
    layers: tuple[LayerState, ...]
    row_bytes: int
    max_rows: int

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.row_bytes * self.max_rows

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        assert max_rows == self.max_rows
        return StateGroup(self.row_bytes, max_rows)
