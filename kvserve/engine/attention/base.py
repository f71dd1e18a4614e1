"""What a forward needs to know of its batch, and what an attention backend has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from kvserve.engine.kv_cache import KVCache


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

    ``positions [T]`` are logical (RoPE); ``slots [LG, R, T]`` are where new entries go;
    ``query_slots [LG, R, T]`` where queries are logged (block 0 takes the rest), or ``None``.
    """

    positions: Tensor
    slots: Tensor
    query_slots: Tensor | None
    spans: tuple[Span, ...]


class AttentionBackend(Protocol):
    """Attention of new tokens over the paged cache they were just stored in."""

    def forward(self, layer: int, q: Tensor, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]."""
        ...
