"""Attention by the Triton kernel: blocks are read where they lie, whatever the layout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.transfer import to_device
from kvserve.kernels.dispatch import HEAD_DIMS
from kvserve.kernels.paged_attention import paged_attention_triton


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
    """Logits are scaled by ``scale``."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """Bounds from what the host knows, so that nothing waits for the device."""
        device, max_chunk = batch.tables.device, int(np.diff(batch.starts).max())
        return _Planned(
            rows=to_device(batch.rows, device),
            starts=None if max_chunk == 1 else to_device(batch.starts, device),
            max_chunk=max_chunk,
            max_columns=int(batch.columns.max()),
            tables=batch.tables,
            last=batch.last.contiguous(),
            scale=self._scale,
        )


@dataclass(frozen=True, slots=True)
class _Planned:
    rows: Tensor
    starts: Tensor | None
    max_chunk: int
    max_columns: int
    tables: Tensor
    last: Tensor
    scale: float

    def forward(self, layer: int, q: Tensor, cache: LayerCache) -> Tensor:
        keys, values, group = cache.keys_values(layer)
        return paged_attention_triton(
            q,
            keys,
            values,
            self.tables[group],
            self.rows,
            self.last[group],
            self.scale,
            self.max_columns * keys.shape[1],
            self.starts,
            self.max_chunk,
        )
