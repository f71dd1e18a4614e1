"""Write new keys and values (and logged queries) to their slots."""

from __future__ import annotations

from torch import Tensor


def store_kv(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store one layer's new entries.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; layer: the layer's place in its block; slots: int64
    [R, T]; key, value: [T, R * Hb, D].
    """
    _, layers, _, block, heads, dim = kv_cache.shape
    flat = kv_cache.view(-1, heads * dim)
    rows = (slots + slots // block * (block * (2 * layers - 1)) + 2 * layer * block).view(-1)
    flat.index_copy_(0, rows, _by_row(key, slots, heads * dim))
    flat.index_copy_(0, rows + block, _by_row(value, slots, heads * dim))


def store_queries(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """Store one layer's reduced queries.

    query_log: [num_blocks, Lb, tokens, Hb, D], the cache seen as log blocks; slots: int64 [R, T];
    query: [T, R * Hb, D].
    """
    _, layers, tokens, heads, dim = query_log.shape
    rows = (slots + slots // tokens * (tokens * (layers - 1)) + layer * tokens).view(-1)
    flat = query_log.view(-1, heads * dim)
    flat.index_copy_(0, rows, _by_row(query, slots, heads * dim))


def _by_row(x: Tensor, slots: Tensor, width: int) -> Tensor:
    """[T, R * Hb, D] -> [R * T, Hb * D], the order of ``slots.view(-1)``."""
    return x.unflatten(1, (len(slots), -1)).transpose(0, 1).reshape(-1, width)
