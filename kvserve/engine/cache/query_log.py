"""The query log: blocks of the cache's pool, read as queries instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.attention.base import StoreInt4, StoreQueries
from kvserve.kernels.causal_scores import Queries
from kvserve.kernels.gather_kv import gather_queries
from kvserve.kernels.int4_log import gather_int4, int4_bytes, int4_log
from kvserve.scheduler.layout import KVLayout


@dataclass(frozen=True)
class LogForm:
    """What a token logs: ``heads`` vectors, Hkv (means over GQA groups) or Hq.

    ``dtype``: ``model`` (the cache's), ``fp8`` (e4m3, a byte a number), or ``int4`` (4 bits a
    number, and beside each vector its scale and the share of its attention that newest entries
    got).
    """

    heads: int
    dtype: str = "model"
    reduction: str = "heads"
    """``heads``, or ``group_mean``: which of the two ``heads`` counts."""

    def block_tokens(self, layout: KVLayout, itemsize: int) -> int:
        """Tokens whose queries one block holds, of a cache with ``itemsize`` bytes a number.

        Raises ``ValueError`` where a block holds none, or queries as numbers do not fill it.
        """
        dim = layout.head_dim
        memory = 2 * layout.block_size * layout.num_kv_heads * dim * itemsize
        vector = {"model": dim * itemsize, "fp8": dim, "int4": int4_bytes(dim)}[self.dtype]
        held, left = divmod(memory, self.heads * vector)
        if not held or (left and self.dtype != "int4"):
            raise ValueError(
                f"a block of {layout.block_size} tokens cannot hold whole queries of "
                f"{self.heads} heads"
            )
        return held


class QueryLog:
    """Log blocks in the memory of ``kv [num_blocks, L/LG, 2, B, Hkv/R, D]``."""

    def __init__(
        self,
        kv: Tensor,
        layout: KVLayout,
        form: LogForm,
        store_queries: StoreQueries,
        store_int4: StoreInt4,
    ) -> None:
        self.form = form
        self.block_tokens = form.block_tokens(layout, kv.itemsize)
        """Tokens whose queries one block holds."""
        self.blocks = _read_as(kv, layout, form, self.block_tokens)
        """[num_blocks, L/LG, tokens, heads / R, D] of numbers (uint8: e4m3), or in 4 bits."""
        self._store_queries, self._store_int4 = store_queries, store_int4

    @property
    def heads(self) -> int:
        """Vectors that a token logs."""
        return self.form.heads

    @property
    def holds_shares(self) -> bool:
        """Whether beside a query stands what share of its attention newest entries got."""
        return self.form.dtype == "int4"

    def store(self, layer: int, slots: Tensor, q: Tensor, shares: Tensor | None) -> None:
        """Log one layer's queries: ``layer`` is its place in a block, ``slots`` int64 [R, T].

        q: [T, Hq, D]; shares: float32 [T, Hq], their logarithms, where they are held.
        """
        if isinstance(self.blocks, Tensor):
            self._store_queries(self.blocks, layer, slots, q)
        else:
            assert shares is not None, "attention was asked for them"
            self._store_int4(self.blocks, layer, slots, q, shares)

    def read(self, slots: Tensor, layers: Tensor) -> Queries:
        """Queries of ``slots [L', heads, S]`` of ``layers [L']``: [L', heads, S, D].

        Those in 4 bits and e4m3 numbers stay as they are: who computes widens them.
        """
        if not isinstance(self.blocks, Tensor):
            return gather_int4(self.blocks, slots, layers)
        entries = gather_queries(self.blocks, slots, layers)
        return entries.view(torch.float8_e4m3fn) if entries.dtype is torch.uint8 else entries


def _read_as(kv: Tensor, layout: KVLayout, form: LogForm, tokens: int) -> Queries:
    num_blocks, layers = kv.shape[:2]
    heads = form.heads // layout.rows
    if form.dtype == "int4":
        memory = kv.view(torch.uint8).view(num_blocks, layers, -1)
        return int4_log(memory, heads, layout.head_dim, tokens)
    memory = kv.view(torch.uint8) if form.dtype == "fp8" else kv
    return memory.view(num_blocks, layers, tokens, heads, layout.head_dim)
