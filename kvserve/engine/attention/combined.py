"""Attention that takes a batch apart: by phase for two backends, by kind of layer for one."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, BatchAttention, ForwardBatch, LayerCache


class ByPhase:
    """Runs chunks by ``prefill`` and the decoding tokens in front of them by ``decode`` (default:
    by the same)."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend | None = None) -> None:
        decode = decode or prefill
        self.prefill, self.decode = prefill, decode
        self.replays, self.replays_chunks = decode.replays, prefill.replays_chunks
        self.reads_remainders = prefill.reads_remainders and decode.reads_remainders

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        decoding, chunks = batch.num_decoding, len(batch.rows)
        if decoding == chunks:
            return self.decode.plan(batch)
        if not decoding:
            return self.prefill.plan(batch)
        prefill = self.prefill.plan(batch.part(decoding, chunks))
        decode = self.decode.plan(batch.part(0, decoding))

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
        self.reads_remainders = backend.reads_remainders

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
