"""The cache's one tensor, and its two readings: blocks of keys and values, blocks of queries."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.kernels.store_kv import store_kv, store_queries
from kvserve.scheduler.layout import KVLayout


class KVCache:
    """``kv [num_blocks, L/LG, 2, B, Hkv/R, D]``; ``query_log`` is the same memory as log blocks.

    ``log_heads`` is how many query vectors a token logs: Hkv (mean over each GQA group) or Hq.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, log_heads: int, dtype: torch.dtype, device: str
    ) -> None:
        self.layout = layout
        self.log_heads = log_heads
        self.kv = torch.zeros(layout.cache_shape(num_blocks), dtype=dtype, device=device)
        self.log_block_tokens = log_block_tokens(layout, log_heads)
        tail = layout.block_elements // layout.layers_per_block
        heads = log_heads // layout.rows
        used = self.log_block_tokens * heads * layout.head_dim
        assert used == tail, "log entries fill a layer's part of a block exactly"
        self.query_log = self.kv.view(
            num_blocks,
            layout.layers_per_block,
            self.log_block_tokens,
            heads,
            layout.head_dim,
        )

    def store(self, layer: int, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one layer's new keys and values, and its queries where they are logged.

        q: [T, Hq, D]; k, v: [T, Hkv, D].
        """
        group, place = divmod(layer, self.layout.layers_per_block)
        store_kv(self.kv, place, batch.slots[group], k, v)
        if batch.query_slots is not None:
            reduced = reduce_queries(q, self.log_heads)
            store_queries(self.query_log, place, batch.query_slots[group], reduced)

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        group, place = divmod(layer, self.layout.layers_per_block)
        return self.kv[:, place, 0], self.kv[:, place, 1], group


def reduce_queries(q: Tensor, heads: int) -> Tensor:
    """q: [T, Hq, D] -> [T, heads, D], means over neighbours; all of them where heads is Hq."""
    return q.unflatten(1, (heads, -1)).mean(dim=2)


def log_block_tokens(layout: KVLayout, log_heads: int) -> int:
    """Tokens whose queries one block of the pool holds, in the model's dtype."""
    tokens = 2 * layout.block_size * layout.num_kv_heads / log_heads
    if tokens != int(tokens) or tokens < 1:
        raise ValueError(
            f"a block of {layout.block_size} tokens cannot hold whole queries of {log_heads} heads"
        )
    return int(tokens)
