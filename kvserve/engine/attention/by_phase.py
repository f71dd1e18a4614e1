"""Attention of decoding tokens and of chunks apart, by one backend or by two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.attention.base import (
    AttentionBackend,
    BatchAttention,
    ForwardBatch,
    LayerCache,
)


class ByPhase:
    """Runs chunks by ``prefill`` and the decoding tokens in front of them by ``decode``."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill = prefill
        self.decode = decode
        self.replays, self.replays_chunks = decode.replays, prefill.replays_chunks
        self.reads_remainders = prefill.reads_remainders and decode.reads_remainders

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        decoding, chunks = batch.num_decoding, len(batch.rows)
        if decoding == chunks:
            return self.decode.plan(batch)
        if not decoding:
            return self.prefill.plan(batch)
        return _Planned(
            self.prefill.plan(batch.part(decoding, chunks)),
            self.decode.plan(batch.part(0, decoding)),
            decoding,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    prefill: BatchAttention
    decode: BatchAttention
    decoding: int

    def forward(
        self,
        layer: int,
        q: Tensor,
        cache: LayerCache,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        front, behind = slice(self.decoding), slice(self.decoding, None)
        before, after = (None, None) if shares is None else (shares[front], shares[behind])
        return torch.cat(
            [
                self.decode.forward(layer, q[front], cache, before, sinks),
                self.prefill.forward(layer, q[behind], cache, after, sinks),
            ]
        )
