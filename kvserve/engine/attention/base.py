"""What a forward needs to know of its batch, and what an attention backend has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """P chunks of at most Q tokens each that attend together, padded to one shape.

    ``tokens [P, Q]`` are places in the batch (``None``: tokens 0..P-1, Q = 1); ``valid [P, Q]``
    says which are real (``None``: all). ``tables [LG, P, R, C]`` are the block tables, cut to the C
    columns in use. ``mask [LG, P * R, 1, Q, C * B]`` is added to the logits: 0 or -inf.
    """

    tokens: Tensor | None
    valid: Tensor | None
    tables: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T tokens: the decoding ones in front, one per row, then the chunks.

    ``positions [T]`` are logical (RoPE), ``prompt_lens [T]`` the prompt length of each token's
    sequence (dynamic RoPE); ``slots [LG, R, T]`` are where new entries go;
    ``query_slots [LG, R, T]`` where queries are logged (block 0 takes the rest), or ``None``.
    """

    positions: Tensor
    prompt_lens: Tensor
    slots: Tensor
    query_slots: Tensor | None
    spans: tuple[Span, ...]


class LayerCache(Protocol):
    """What a layer needs of a cache. ``KVCache`` writes what it is given; others may not."""

    def store(self, layer: int, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one layer's new entries. q: [T, Hq, D]; k, v: [T, Hkv, D]."""
        ...

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        ...


class AttentionBackend(Protocol):
    """Attention of new tokens over the paged cache they were just stored in."""

    def forward(self, layer: int, q: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]."""
        ...
