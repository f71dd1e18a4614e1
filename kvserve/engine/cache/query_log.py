"""The query log: blocks of the cache's pool, read as queries instead of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.engine.cache.log_form import LogForm
from kvserve.entry_format import ALIGNED
from kvserve.kernels.storage import StorageKernels
from kvserve.scheduler.layout import KVLayout

if TYPE_CHECKING:
    from kvserve.kernels.score.causal_scores import Queries


class QueryLog:
    """Log blocks of ``block_tokens`` in the cache's memory ``kv [num_blocks, L/LG, ...]``.

    ``blocks`` are [num_blocks, L/LG, block_tokens, heads / R, D], of numbers (uint8: e4m3) or in 4
    bits.
    """

    blocks: Queries

    def __init__(
        self,
        kv: Tensor,
        layout: KVLayout,
        form: LogForm,
        block_tokens: int,
        dtype: torch.dtype,
        kernels: StorageKernels,
    ) -> None:
        """``dtype`` is the model's."""
        self.block_tokens = block_tokens
        """Tokens whose queries one block holds."""
        self.heads = form.heads
        """Vectors that a token logs."""
        self._kernels = kernels
        heads, dim = form.heads // layout.rows, layout.head_dim
        memory, layers = kv.flatten(1).view(torch.uint8), layout.layers_per_block
        part = memory.shape[1] // layers // ALIGNED * ALIGNED
        memory = memory[:, : layers * part].unflatten(1, (layers, part))
        if form.dtype == "int4":
            from kvserve.kernels.store.int4_log import int4_log

            self.blocks = int4_log(memory, heads, dim, block_tokens)
            return
        logged = torch.uint8 if form.dtype == "fp8" else dtype
        used = block_tokens * heads * dim * logged.itemsize
        self.blocks = memory[..., :used].view(logged).unflatten(-1, (block_tokens, heads, dim))

    def store(self, layer: int, slots: Tensor, q: Tensor, shares: Tensor | None) -> None:
        """Log one layer's queries: ``layer`` is its place in a block, ``slots`` int64 [R, T].

        q: [T, Hq, D]; shares: float32 [T, Hq], logarithms, if it is in 4 bits.
        """
        if isinstance(self.blocks, Tensor):
            self._kernels.store_queries(self.blocks, layer, slots, q)
        else:
            assert shares is not None, "attention was asked for them"
            self._kernels.store_int4(self.blocks, layer, slots, q, shares)

    def read(self, slots: Tensor, layers: Tensor | None) -> Queries:
        """Queries of ``slots [L', heads, S]`` of ``layers [L']`` (default: all): [L', heads, S, D].

        4-bit and e4m3 queries keep their form; the scoring kernels widen them.
        """
        if not isinstance(self.blocks, Tensor):
            return self._kernels.gather_int4(self.blocks, slots, layers)
        entries = self._kernels.gather_queries(self.blocks, slots, layers)
        return entries.view(torch.float8_e4m3fn) if entries.dtype is torch.uint8 else entries
