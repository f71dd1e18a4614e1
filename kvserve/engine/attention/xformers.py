"""Attention by the xformers package over gathered blocks, for chunks of new tokens.

Not run on a GPU yet: tested against a stand-in with its signature (xformers 0.0.35).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache


class XformersAttention:
    """Logits are scaled by ``scale``; blocks hold ``block_size`` entries."""

    replays = replays_chunks = False
    reads_remainders = False

    def __init__(self, scale: float, block_size: int) -> None:
        from xformers.ops import fmha

        self._fmha: Any = fmha
        self._scale = scale
        self._block_size = block_size

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """The package takes only causal chunks: in other batches each token is its own chunk."""
        batch = batch if batch.causal else batch.by_token()
        tables, held = batch.chunk_rows()
        room = tables.shape[-1] * self._block_size
        mask = self._fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=np.diff(batch.starts).tolist(),
            kv_padding=room,
            kv_seqlen=[room] * len(batch.rows),
            device=tables.device,
        )
        # The host knows only upper bounds: the rows' lengths are put in on the device.
        masks = [replace(mask, k_seqinfo=replace(mask.k_seqinfo, seqlen=seqlen)) for seqlen in held]

        def attend(
            layer: int,
            q: Tensor,
            cache: LayerCache,
            shares: Tensor | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            assert shares is None and sinks is None, "refused by select.py where there are any"
            keys, values, group = cache.keys_values(layer)
            assert isinstance(keys, Tensor) and isinstance(values, Tensor), "levels are refused"
            tokens, q_heads, dim = q.shape
            heads = keys.shape[2]
            blocks, shape = tables[group].flatten(), (-1, -1, -1, q_heads // heads, -1)
            # One row after the other, and the query heads of a KV head share its keys.
            k, v = (
                x.index_select(0, blocks).view(1, -1, heads, 1, dim).expand(shape)
                for x in (keys, values)
            )
            folded = q.reshape(1, tokens, heads, -1, dim)
            how = {"attn_bias": masks[group], "scale": self._scale}
            found: Tensor = self._fmha.memory_efficient_attention_forward(folded, k, v, **how)
            return found.reshape(q.shape)

        return attend
