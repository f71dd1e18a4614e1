"""Some tokens on the device, and what a forward gets of them: the newest, which layers with sliding
windows see; and the newest and the first as they were computed, beside entries in few bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.models.transformer import Transformer
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.window_group import FirstSpec, NewestSpec, WindowSpec


class WindowRows(RowGroup):
    """Blocks of the newest tokens, in the columns of their logical positions."""

    spec_type = WindowSpec
    spec: WindowSpec

    def over(
        self, batch: ForwardBatch, rows: Tensor, columns: IntArray, rounded_at: Tensor
    ) -> ForwardBatch:
        """What layers with windows see: the newest tokens, their own included."""
        last = self._lanes(batch.positions)
        return self._added(batch, self.slots(rows, batch.positions), last, columns)

    def nothing_of(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` whose tokens see nothing there either, and are stored in the null block."""
        last = self._lanes(torch.full_like(batch.positions, -1))
        return self._added(batch, torch.zeros_like(last), last, batch.columns)

    def update(self, batch: ForwardBatch, rows: Tensor, real: Tensor, rounded_at: Tensor) -> None:
        own, positions = batch.windowed, batch.positions
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
            most_seen=self.spec.window + int(np.diff(batch.starts).max()),
            tables=table,
            columns=columns,
            codes=None,
            recent=None,
            remainders=None,
            further=(),
        )
        return replace(batch, windowed=own)

    def _first(self, last: Tensor) -> Tensor:
        return (last - self.spec.window + 1).clamp(min=0)

    def _lanes(self, positions: Tensor) -> Tensor:
        """[T] -> [LG, R, T], dense."""
        (table,) = self.tables
        return positions.expand(table.shape[0], table.shape[2], -1).contiguous()


KINDS.append(WindowRows)


class FirstRows(RowGroup):
    """The block of a row's first entries as they were computed."""

    spec_type = FirstSpec
    writes = True

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        self._cache = cache

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The null block takes all that are not in it."""
        size = self.spec.block_tokens
        found = super().slots(rows, positions.clamp(max=size - 1))
        return torch.where(positions < size, found, 0)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if layer not in self._cache.layers.windowed:
            self._cache.write_newest(layer, slots, k, v)


KINDS.append(FirstRows)


class NewestRows(RowGroup):
    """Blocks of the newest entries as they were computed, in the columns of their positions.

    A token reads entries from the last multiple of the group's ``window`` on so, its own included,
    but none from before the row's last event: behind one, a row's entries no longer lie in the
    order of its tokens. Older ones it reads in few bits, but for the row's first entry, which no
    event drops, in layers that see all tokens. Neither chunks nor cached prefixes change that.
    """

    spec_type = NewestSpec
    spec: NewestSpec
    writes = True

    @cached_property
    def _first(self) -> FirstRows:
        return next(group for group in self._cache.writers if isinstance(group, FirstRows))

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        cache.hold_newest(self.spec.block_tokens)
        self._cache = cache

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._cache.write_newest(layer, slots, k, v)

    def over(
        self, batch: ForwardBatch, rows: Tensor, columns: IntArray, rounded_at: Tensor
    ) -> ForwardBatch:
        """Tokens see these entries instead of what they saw of the same tokens."""
        size = self.spec.block_tokens
        columns = -(-columns * self._cache.layout.block_size // size)
        columns = np.minimum(columns, self.tables[0].shape[3])
        first = self._exact_from(batch.positions, rounded_at[rows])
        return self._of_kinds(batch, first, columns)

    def nothing_of(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` whose tokens see nothing of these, either."""
        columns = np.full_like(batch.columns, self.tables[0].shape[3])
        return self._of_kinds(batch, batch.positions + 1, columns)

    def update(self, batch: ForwardBatch, rows: Tensor, real: Tensor, rounded_at: Tensor) -> None:
        """What tokens see of others is filled in."""
        first = self._exact_from(batch.positions, rounded_at[rows])
        first = torch.where(real, first, batch.positions + 1)
        columns = np.zeros(0, np.int64)
        new = self._of_kinds(batch, first, columns)
        for own, now in ((batch, new), (batch.windowed, new.windowed)):
            if own is None or now is None:
                continue
            assert own.newest is not None and now.newest is not None
            # The newest first: ``now`` has their counts from the buffers of the others.
            for buffers, filled in ((own.newest, now.newest), (own, now)):
                buffers.last.copy_(filled.last)
                if buffers.recent is not None and filled.recent is not None:
                    buffers.recent.copy_(filled.recent)
            if own.newest.first is not None and now.newest.first is not None:
                own.newest.first.copy_(now.newest.first)

    def _exact_from(self, positions: Tensor, rounded_at: Tensor) -> Tensor:
        """The first entry that each token reads as it was computed: [T]."""
        return torch.maximum(positions // self.spec.window * self.spec.window, rounded_at)

    def _of_kinds(self, batch: ForwardBatch, first: Tensor, columns: IntArray) -> ForwardBatch:
        """For the layers that see all tokens, and for those with windows."""
        (table,), (of_first,), windowed = self.tables, self._first.tables, batch.windowed
        full = len(of_first)
        table[:full, ..., :1] = of_first
        if windowed is not None:
            windowed = self._beside(windowed, first, table[full:], columns)
        if full:
            always = torch.ones_like(batch.last)
            batch = replace(self._beside(batch, first, table[:full], columns, always), first=always)
        return replace(batch, windowed=windowed)

    def _beside(
        self,
        batch: ForwardBatch,
        first: Tensor,
        table: Tensor,
        columns: IntArray,
        always: Tensor | None = None,
    ) -> ForwardBatch:
        """Tokens see these entries from ``first [T]`` up to their own, and so many fewer others;
        and those before ``always [LG, R, T]``, which are the first of the others."""
        last, earliest = batch.positions, batch.first if always is None else always
        if batch.first is not None:  # by logical position, too
            first = torch.maximum(first, batch.first[0, 0])
        count = last - first + 1
        others = batch.last - count
        if earliest is not None:
            others = others.masked_fill(others < earliest, -1)
        lanes = len(table), table.shape[2], len(last)
        seen = torch.where(count > 0, last, -1)
        newest = replace(
            batch,
            slots=batch.slots[..., :0],
            query_slots=None,
            last=seen.expand(lanes).contiguous(),
            first=first.expand(lanes).contiguous(),
            always=always,
            most_seen=self.spec.window + int(np.diff(batch.starts).max()),
            tables=table,
            block_tokens=self.spec.block_tokens,
            columns=columns,
            codes=None,
            remainders=None,
            further=(),
            windowed=None,
        )
        recent = None if batch.recent is None else batch.recent - count
        return replace(batch, last=others, recent=recent, newest=newest, causal=False)


KINDS.append(NewestRows)
