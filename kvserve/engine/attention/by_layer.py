"""Attention of layers that see all tokens, and of those that see the newest alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from kvserve.engine.attention.base import (
    AttentionBackend,
    BatchAttention,
    ForwardBatch,
    LayerCache,
)


class ByLayer:
    """Plans a batch twice for one backend: over the tables of either kind of layer."""

    def __init__(self, backend: AttentionBackend, windowed: Collection[int]) -> None:
        self.backend, self.windowed = backend, windowed
        self.replays, self.replays_chunks = backend.replays, backend.replays_chunks
        self.reads_remainders = backend.reads_remainders

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        assert batch.windowed is not None, "the cache has no tables for layers with windows"
        both = self.backend.plan(batch), self.backend.plan(batch.windowed)
        return _Planned(*both, self.windowed)


@dataclass(frozen=True, slots=True)
class _Planned:
    full: BatchAttention
    newest: BatchAttention
    windowed: Collection[int]

    def forward(
        self,
        layer: int,
        q: Tensor,
        cache: LayerCache,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if layer in self.windowed:  # none of their queries is logged
            return self.newest.forward(layer, q, cache, None, sinks)
        return self.full.forward(layer, q, cache, shares, sinks)
