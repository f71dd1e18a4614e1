"""Attention that takes a batch apart, by phase or by kind of layer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, BatchAttention, ForwardBatch, LayerCache


class ByPhase:
    """Plans chunks, and the decoding tokens in front of them, each by themselves."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.replays, self.replays_chunks = backend.replays, backend.replays_chunks

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        decoding, chunks = batch.num_decoding, len(batch.rows)
        if decoding in (0, chunks):
            return self.backend.plan(batch)
        prefill = self.backend.plan(batch.part(decoding, chunks))
        decode = self.backend.plan(batch.part(0, decoding))

        def one_behind_the_other(
            layer: int,
            q: Tensor,
            cache: LayerCache,
            shares: Tensor | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            front, behind = slice(decoding), slice(decoding, None)
            before, after = (None, None) if shares is None else (shares[front], shares[behind])
            decoded = decode(layer, q[front], cache, before, sinks)
            return torch.cat([decoded, prefill(layer, q[behind], cache, after, sinks)])

        return one_behind_the_other


class ByLayer:
    """Plans a batch twice for one backend: over the tables of layers that see all tokens, and of
    those ``windowed``, which see the newest alone."""

    def __init__(self, backend: AttentionBackend, windowed: Collection[int]) -> None:
        self.backend, self.windowed = backend, windowed
        self.replays, self.replays_chunks = backend.replays, backend.replays_chunks

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        assert batch.windowed is not None, "the cache has no tables for layers with windows"
        full, newest = self.backend.plan(batch), self.backend.plan(batch.windowed)

        def by_layer(
            layer: int,
            q: Tensor,
            cache: LayerCache,
            shares: Tensor | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            if layer in self.windowed:  # none of their queries is logged
                return newest(layer, q, cache, None, sinks)
            return full(layer, q, cache, shares, sinks)

        return by_layer
