"""The query log: blocks of the cache's pool, read as queries instead of keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.engine.cache.entry_store import block_bytes
from kvserve.entry_format import ALIGNED, EntryFormat, int4_bytes
from kvserve.kernels.storage import StorageKernels
from kvserve.scheduler.layout import KVLayout

if TYPE_CHECKING:
    from kvserve.kernels.scores.causal_scores import Queries


@dataclass(frozen=True)
class LogForm:
    """What a token logs: ``heads`` vectors, Hkv (means over GQA groups) or Hq.

    ``dtype``: ``model`` (the cache's), ``fp8`` (e4m3, a byte a number), or ``int4`` (4 bits a
    number; each vector has its scale and the share of its attention that newest entries got).
    """

    heads: int
    dtype: str = "model"
    reduction: str = "heads"
    """``heads``, or ``group_mean``: which of the two ``heads`` counts."""

    def block_tokens(self, layout: KVLayout, form: EntryFormat, itemsize: int) -> int:
        """Tokens whose queries one block holds, ``itemsize`` bytes a number as it is computed.

        What is left of a block is not used; 0 if a block is too small for one token's.
        """
        layer = block_bytes(layout, form) // layout.layers_per_block // ALIGNED * ALIGNED
        return layer * layout.rows // self._token_bytes(layout.head_dim, itemsize)

    def least_block(self, layout: KVLayout, form: EntryFormat, itemsize: int) -> int:
        """The block size from which on a block of such entries holds a token's queries."""
        entry = layout.num_kv_heads * form.mean_bytes(layout.head_dim, layout.layers_per_block)
        return math.ceil(self._token_bytes(layout.head_dim, itemsize) / entry)

    def _token_bytes(self, dim: int, itemsize: int) -> int:
        """Bytes of a token's queries in one layer."""
        vector = {"model": dim * itemsize, "fp8": dim, "int4": int4_bytes(dim)}[self.dtype]
        return self.heads * vector

    def read_as_log(self, kv: Tensor, layout: KVLayout, tokens: int, dtype: torch.dtype) -> Queries:
        """View blocks ``kv [num_blocks, L/LG, ...]`` as log blocks of ``tokens`` tokens each.

        Returns [num_blocks, L/LG, tokens, heads / R, D] of numbers (uint8: e4m3), or in 4 bits.
        """
        heads, dim = self.heads // layout.rows, layout.head_dim
        memory, layers = kv.flatten(1).view(torch.uint8), layout.layers_per_block
        part = memory.shape[1] // layers // ALIGNED * ALIGNED
        memory = memory[:, : layers * part].unflatten(1, (layers, part))
        if self.dtype == "int4":
            from kvserve.kernels.int4_log import int4_log

            return int4_log(memory, heads, dim, tokens)
        logged = torch.uint8 if self.dtype == "fp8" else dtype
        used = tokens * heads * dim * logged.itemsize
        return memory[..., :used].view(logged).unflatten(-1, (tokens, heads, dim))


class QueryLog:
    """Log blocks in the cache's memory: ``blocks`` as ``LogForm.read_as_log`` gives them."""

    def __init__(
        self, view: Callable[[], Queries], tokens: int, form: LogForm, kernels: StorageKernels
    ) -> None:
        self._view = view
        self.block_tokens = tokens
        """Tokens whose queries one block holds."""
        self.heads = form.heads
        """Vectors that a token logs."""
        self._kernels = kernels

    @cached_property
    def blocks(self) -> Queries:
        return self._view()

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
