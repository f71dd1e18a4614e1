"""The tables of layers with sliding windows, on the device, and what a forward gets of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.window_group import WindowSpec


class WindowRows(RowGroup):
    """Blocks of the newest tokens, in the columns of their logical positions."""

    spec_type = WindowSpec

    def over(self, batch: ForwardBatch, rows: Tensor, columns: IntArray) -> ForwardBatch:
        """``batch`` with what layers with windows see: tokens at ``batch.positions [T]`` of ``rows
        [T]`` see the newest, their own included; ``columns [S]`` are in use by tokens."""
        last = self._lanes(batch.positions)
        return self._added(batch, self.slots(rows, batch.positions), last, columns)

    def nothing_of(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` whose tokens see nothing there either, and are stored in the null block."""
        last = self._lanes(torch.full_like(batch.positions, -1))
        return self._added(batch, torch.zeros_like(last), last, batch.columns)

    def update(self, batch: ForwardBatch, rows: Tensor, positions: Tensor, real: Tensor) -> None:
        """Fill the buffers that ``nothing_of`` gave ``batch``, for its ``real [T]`` tokens."""
        own = batch.windowed
        assert own is not None and own.first is not None
        own.slots.copy_(torch.where(real, self.slots(rows, positions), 0))
        own.last.copy_(torch.where(real, self._lanes(positions), -1))
        own.first.copy_(self._first(own.last))

    def _added(
        self, batch: ForwardBatch, slots: Tensor, last: Tensor, columns: IntArray
    ) -> ForwardBatch:
        (table,) = self.tables
        own = replace(
            batch,
            slots=slots,
            query_slots=None,
            last=last,
            first=self._first(last),
            most_seen=self.window + int(np.diff(batch.starts).max()),
            tables=table,
            columns=columns,
            codes=None,
            recent=None,
            remainders=None,
            further=(),
        )
        return replace(batch, windowed=own)

    @property
    def window(self) -> int:
        assert isinstance(self.spec, WindowSpec)
        return self.spec.window

    def _first(self, last: Tensor) -> Tensor:
        return (last - self.window + 1).clamp(min=0)

    def _lanes(self, positions: Tensor) -> Tensor:
        """[T] -> [LG, R, T], dense."""
        (table,) = self.tables
        return positions.expand(table.shape[0], table.shape[2], -1).contiguous()


KINDS.append(WindowRows)
