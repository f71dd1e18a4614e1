"""A forward over buffers that never move: what a CUDA graph or a tape runs again and again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, BatchAttention, ForwardBatch
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.attend.decode_inputs import Chunks
from kvserve.scheduler.arrays import IntArray

BOTH_KINDS = (False, True)
"""Steps whose queries are not logged, and steps whose are."""


@dataclass(frozen=True)
class StepParts:
    """What steps compute with."""

    model: Transformer
    cache: KVCache
    rows: InputBatch
    attention: AttentionBackend

    def step(self, size: int, logs_queries: bool, count: Tensor) -> PaddedStep:
        """One token of each of the first ``size`` rows, of which ``count []`` are there."""
        buffers = self.rows.decoding(size, logs_queries)
        return PaddedStep(self, count, buffers, self.attention.plan(buffers))

    def chunks(self, starts: IntArray, logs_queries: bool, count: Tensor) -> PaddedStep:
        """The same with chunks at ``starts [size + 1]``, int64. On a CPU they may be moved."""
        size, device = len(starts) - 1, self.rows.device
        buffers = self.rows.decoding(size, logs_queries, starts)
        begins = to_device(buffers.starts, device)  # the same memory on a CPU
        rows = to_device(np.repeat(np.arange(size), np.diff(starts)), device)
        chunks = Chunks(begins, begins.diff(), rows)
        planned, ids = self.attention.plan(buffers), torch.zeros_like(rows)
        return PaddedStep(self, count, buffers, planned, chunks, ids)


@dataclass(frozen=True, eq=False)
class PaddedStep:
    """Tokens of the first rows, as many as ``buffers`` are for."""

    parts: StepParts
    count: Tensor
    buffers: ForwardBatch
    planned: BatchAttention
    chunks: Chunks | None = None
    token_ids: Tensor | None = None
    """Of chunks: [T]; those of single tokens are the rows' newest."""

    def forward(self) -> Tensor:
        """Hidden states of all tokens; those of rows behind the first ``count`` are padding."""
        return self.compute(self.update())

    def update(self) -> Tensor:
        """Fill the buffers; token ids, at the same address each time."""
        newest = self.parts.rows.update_graph_inputs(self.buffers, self.count, self.chunks)
        return newest if self.token_ids is None else self.token_ids

    def compute(self, input_ids: Tensor) -> Tensor:
        """Hidden states of the tokens that the buffers describe."""
        return self.parts.model(input_ids, self.buffers, self.parts.cache, self.planned)
