"""Attention by the compiled kernel: blocks are read where they lie, without mask or padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.transfer import to_device
from kvserve.kernels.cpu.paged_attention import Chunks, paged_attention


class CpuAttention:
    """Logits are scaled by ``scale``."""

    replays = True

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """The batch as the kernel takes it: chunks, and the tables as they are."""
        rows, starts = (to_device(x, "cpu") for x in (batch.rows, batch.starts))
        return _Planned(Chunks(rows, starts, batch.last.contiguous()), batch.tables, self._scale)


@dataclass(frozen=True, slots=True)
class _Planned:
    chunks: Chunks
    tables: Tensor
    scale: float

    def forward(self, layer: int, q: Tensor, cache: LayerCache) -> Tensor:
        keys, values, group = cache.keys_values(layer)
        return paged_attention(q, keys, values, self.tables, self.chunks, group, self.scale)
