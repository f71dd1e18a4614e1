"""Attention by the Triton kernel: blocks are read where they lie, whatever the layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
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
from kvserve.kernels.attention.paged_attention import Newest
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.checks import HEAD_DIMS
from kvserve.kernels.coded_entries import Codes
from kvserve.kernels.query_segments import QuerySegments


def refusal(device: str, head_dim: int) -> str | None:
    """Why the kernels cannot run here, if they cannot."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs Triton's interpreter: TRITON_INTERPRET=1"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


class TritonAttention:
    """Logits are scaled by ``scale``, then capped at ``soft_cap`` unless it is 0; blocks hold
    ``block_size`` entries."""

    replays = replays_chunks = True
    reads_remainders = True

    def __init__(self, scale: float, block_size: int, soft_cap: float = 0.0) -> None:
        self._scale, self._soft_cap = scale, soft_cap
        self._block_size = block_size

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """Takes bounds from what the host knows, so that it does not wait for the device."""
        return self._planned(batch)

    def _planned(self, batch: ForwardBatch) -> _Planned:
        device, max_chunk = batch.tables.device, int(np.diff(batch.starts).max())
        rows = to_device(batch.rows, device)
        starts = None if max_chunk == 1 else to_device(batch.starts, device)
        size = batch.block_tokens or self._block_size
        max_held = batch.most_seen or int(batch.columns.max()) * size
        firsts = [None] * len(batch.last) if batch.first is None else batch.first.contiguous()
        chunks = [
            QuerySegments(rows, last, max_held, starts, max_chunk, first)
            for last, first in zip(batch.last.contiguous(), firsts, strict=True)
        ]
        how = chunks, batch.tables, self._scale, self._soft_cap
        newest = None if batch.newest is None else self._planned(batch.newest)
        return _Planned(*how, batch.codes, batch.recent, batch.remainders, newest)


@dataclass(frozen=True, slots=True)
class _Planned:
    chunks: list[QuerySegments]
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
        tables, chunks = self.tables[group], self.chunks[group]
        codes = None if self.codes is None else self.codes[group]
        how = tables, chunks, self.scale
        newest = None
        if self.newest is not None:
            k, v, own = cache.newest_keys_values(layer)
            of_own = self.newest.tables[own], self.newest.chunks[own], self.newest.recent
            newest = Newest(k, v, *of_own)
        return paged_attention_triton(
            q,
            keys,
            values,
            *how,
            codes=codes,
            shares=wanted_shares(shares, self.recent),
            remainder=remainder_of(self.remainders, layer),
            sinks=sinks,
            soft_cap=self.soft_cap,
            newest=newest,
        )
