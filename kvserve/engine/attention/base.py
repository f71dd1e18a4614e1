"""What a forward needs to know of its batch, and what an attention backend has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvserve.engine.code_store import CodedRows
from kvserve.scheduler.block_pool import IntArray

StoreKV = Callable[[Tensor, int, Tensor, Tensor, Tensor], None]
"""``store_kv`` of ``kvserve.kernels.store_kv``, or another that does the same."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens in S chunks, each of one table row: the decoding ones in front, one token a chunk.

    On the device: ``positions [T]`` are logical (RoPE), ``prompt_lens [T]`` the prompt length of
    each token's sequence (dynamic RoPE); ``slots [LG, R, T]`` are where new entries go (empty: none
    are stored); ``query_slots [LG, R, T]`` where queries are logged (block 0 takes the rest), or
    ``None``. Token t sees entries 0 to ``last [LG, R, T]`` of its row in ``tables [LG, num_rows,
    R, M]``.

    On the host: ``rows [S]`` of the tables; ``starts [S + 1]``, the chunks' first tokens and T;
    ``columns [S]``, the blocks in use by each chunk's row (the longest of its groups).

    ``codes``: what of the rows is held as codes, and has to be rebuilt before a layer attends.
    """

    positions: Tensor
    prompt_lens: Tensor
    slots: Tensor
    query_slots: Tensor | None
    last: Tensor
    tables: Tensor
    rows: IntArray
    starts: IntArray
    columns: IntArray
    codes: CodedRows | None = None


class LayerCache(Protocol):
    """What a layer needs of a cache. ``KVCache`` writes what it is given; others may not."""

    def store(self, layer: int, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one layer's new entries. q: [T, Hq, D]; k, v: [T, Hkv, D]."""
        ...

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        ...


class BatchAttention(Protocol):
    """Attention of one batch's tokens over the paged cache they were just stored in."""

    def forward(self, layer: int, q: Tensor, cache: LayerCache) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention; ``select.py`` says which there are and what each can do."""

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """Prepare, once for all layers, whatever this backend wants to know of a batch."""
        ...
