"""Write new keys and values (and logged queries) to their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled, slot_outside
from kvserve.kernels.store.slot_mapping import by_row

_STORE_KV, _STORE_QUERIES = Compiled("store_kv", "storage"), Compiled("store_queries", "storage")
_E4M3 = torch.finfo(torch.float8_e4m3fn)


def store_kv_torch(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store one layer's new entries; the reference.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D], each block dense; layer: the layer's place in its
    block; slots: int64 [R, T]; key, value: [T, R * Hb, D].
    """
    block = kv_cache.shape[3]
    for kind, new in enumerate((key, value)):
        kv_cache[:, layer, kind][slots // block, slots % block] = by_row(new, slots)


def store_queries_torch(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """Log one layer's queries, as means over groups of neighbouring heads; the reference.

    query_log: [num_blocks, Lb, tokens, Hb, D], the cache seen as log blocks (uint8: e4m3 numbers);
    slots: int64 [R, T]; query: [T, R * Hb * group, D].
    """
    tokens, logged = query_log.shape[2], as_logged(query_log, slots, query)
    query_log[:, layer][slots // tokens, slots % tokens] = by_row(logged, slots)


def store_kv_cpu(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """``ValueError`` for shapes that do not fit each other; ``IndexError``, with nothing written,
    for a slot that is not there."""
    num_blocks, _, _, size, heads, dim = kv_cache.shape
    tables, tokens = slots.shape
    if not kv_cache[:1].is_contiguous():
        raise ValueError(f"store_kv: blocks of a cache {list(kv_cache.shape)} have to be dense")
    for new in (key, value):
        _check_new(kv_cache, slots, new, (tokens, tables * heads, dim))
    strides = (x.stride(0) * x.itemsize for x in (key, value, kv_cache))
    _STORE_KV(
        *(key, value, kv_cache[:, layer, 0], kv_cache[:, layer, 1], slots),
        *(*strides, tokens, num_blocks, size, tables, heads * dim * kv_cache.itemsize),
        refused=slot_outside(num_blocks, size),
    )


def store_queries_cpu(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """Not for block 0; float32 or bfloat16, a layer of a block dense. Errors as ``store_kv_cpu``'s.

    A CPU does not log e4m3 numbers by itself: torch does.
    """
    if query_log.dtype is torch.uint8:
        return store_queries_torch(query_log, layer, slots, query)
    num_blocks, _, size, heads, dim = query_log.shape
    tables, tokens = slots.shape
    group = query.shape[1] // (tables * heads)
    if query_log.stride()[2:] != (heads * dim, dim, 1):
        raise ValueError(f"store_queries: a layer of a block is not dense: {query_log.stride()}")
    _check_new(query_log, slots, query, (tokens, tables * heads * group, dim))
    _STORE_QUERIES(
        *(query, query_log[:, layer], slots, query.stride(0), query_log.stride(0)),
        *(tokens, num_blocks, size, tables, heads, group, dim, query.dtype is torch.bfloat16),
        refused=slot_outside(num_blocks, size),
    )


def _check_new(cache: Tensor, slots: Tensor, new: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless the compiled kernels' assumptions hold."""
    if new.shape != shape or new.stride()[1:] != (shape[2], 1) or not slots.is_contiguous():
        raise ValueError(
            f"store_kv: new entries {list(new.shape)} for slots {list(slots.shape)} of a cache "
            f"{list(cache.shape)}: {list(shape)} is needed, each tensor dense"
        )
    if new.dtype is not cache.dtype or slots.dtype is not torch.int64:
        raise ValueError(
            f"store_kv: new entries of {new.dtype} and slots of {slots.dtype}: "
            f"{cache.dtype} and torch.int64 are needed"
        )


def reduce_queries(q: Tensor, heads: int) -> Tensor:
    """q: [T, Hq, D] -> [T, heads, D], means over neighbouring heads; unchanged if heads is Hq."""
    return q.unflatten(1, (heads, -1)).mean(dim=2)


def as_logged(query_log: Tensor, slots: Tensor, query: Tensor) -> Tensor:
    reduced = reduce_queries(query, len(slots) * query_log.shape[3])
    if query_log.dtype is not torch.uint8:
        return reduced
    return reduced.clamp(-_E4M3.max, _E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
