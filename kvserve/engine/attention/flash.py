"""Attention by the flash-attn package, which reads blocks of a multiple of 256 entries in place.

Not run on a GPU yet: tested against a stand-in with its signature (flash-attn 2.8).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.transfer import to_device


class FlashAttention:
    """Logits are scaled by ``scale``."""

    replays = replays_chunks = False
    reads_remainders = False

    def __init__(self, scale: float) -> None:
        from flash_attn import flash_attn_varlen_func

        self._attend: Callable[..., Tensor] = flash_attn_varlen_func
        self._scale = scale

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """The package takes only causal chunks: in other batches each token is its own chunk."""
        batch = batch if batch.causal else batch.by_token()
        tables, held = batch.chunk_rows()
        starts = to_device(batch.starts, tables.device, torch.int32)
        held_starts = F.pad(held.cumsum(1, dtype=torch.int32), (1, 0))
        longest = int(np.diff(batch.starts).max())

        def attend(
            layer: int,
            q: Tensor,
            cache: LayerCache,
            shares: Tensor | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            assert shares is None and sinks is None, "refused by select.py where there are any"
            keys, values, group = cache.keys_values(layer)
            return self._attend(
                q,
                keys,
                values,
                cu_seqlens_q=starts,
                cu_seqlens_k=held_starts[group],
                max_seqlen_q=longest,
                max_seqlen_k=tables.shape[-1] * keys.shape[1],
                softmax_scale=self._scale,
                causal=True,
                block_table=tables[group],
            )

        return attend
