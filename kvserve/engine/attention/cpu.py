"""Attention by the compiled kernel: blocks are read where they lie, without mask or padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.attention.base import (
    BatchAttention,
    ForwardBatch,
    LayerCache,
    RowRemainders,
    remainder_of,
    wanted_shares,
)
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.attention.paged_attention_cpu import (
    Begun,
    CpuQuerySegments,
    begin_attention,
    paged_attention,
)
from kvserve.kernels.coded_entries import Codes


class CpuAttention:
    """Logits are scaled by ``scale``, then capped at ``soft_cap`` unless it is 0."""

    replays = replays_chunks = True
    reads_remainders = True

    def __init__(self, scale: float, soft_cap: float = 0.0) -> None:
        self._scale, self._soft_cap = scale, soft_cap

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """The batch as the kernel takes it: chunks, and the tables as they are."""
        return self._planned(batch)

    def _planned(self, batch: ForwardBatch) -> _Planned:
        rows, starts = (to_device(x, "cpu") for x in (batch.rows, batch.starts))
        first = None if batch.first is None else batch.first.contiguous()
        chunks = CpuQuerySegments(rows, starts, batch.last.contiguous(), first)
        how = chunks, batch.tables, self._scale, self._soft_cap
        newest = None if batch.newest is None else self._planned(batch.newest)
        return _Planned(*how, batch.codes, batch.recent, batch.remainders, newest)


@dataclass(frozen=True, slots=True)
class _Planned:
    chunks: CpuQuerySegments
    tables: Tensor
    scale: float
    soft_cap: float
    codes: tuple[Codes, ...] | None
    recent: Tensor | None
    remainders: RowRemainders | None
    newest: _Planned | None

    def forward(
        self,
        layer: int,
        q: Tensor,
        cache: LayerCache,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values, group = cache.keys_values(layer)
        codes = None if self.codes is None else self.codes[group]
        wanted = wanted_shares(shares, self.recent)
        remainder = remainder_of(self.remainders, layer)
        begun = None if self.newest is None else self.newest.begin(layer, q, cache, shares)
        how = self.tables, self.chunks, group, self.scale, codes, wanted, remainder
        return paged_attention(q, keys, values, *how, sinks, self.soft_cap, begun)

    def begin(self, layer: int, q: Tensor, cache: LayerCache, shares: Tensor | None) -> Begun:
        """Attention to these entries alone, as they were computed."""
        keys, values, group = cache.newest_keys_values(layer)
        own = None if shares is None else torch.empty_like(shares)
        recent = wanted_shares(own, self.recent)
        how = self.tables, self.chunks, group, self.scale, recent, self.soft_cap
        return begin_attention(q, keys, values, *how)
