"""Writing new keys, values and logged queries on a CPU: calls ``store_kv.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library
from kvserve.kernels.store_kv import store_queries_torch

_POINTERS = ("key", "value", "keys", "values", "slots", "fault")
_NUMBERS = (
    *("key_stride", "value_stride", "block_stride"),
    *("num_tokens", "num_blocks", "block_size", "num_tables", "width"),
)


_QUERY_POINTERS = ("query", "log", "slots", "fault")
_QUERY_NUMBERS = (
    *("query_stride", "block_stride"),
    *("num_tokens", "num_blocks", "block_size", "num_tables", "heads", "group", "dim", "is_bf16"),
)


class _QueryCall(ctypes.Structure):
    """``StoreQueries`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _QUERY_POINTERS),
        *((name, ctypes.c_int64) for name in _QUERY_NUMBERS),
    )


class _Call(ctypes.Structure):
    """``StoreKV`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def store_kv(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store one layer's new entries, as ``kvserve.kernels.store_kv``, which is the reference.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D], each block dense; layer: the layer's place in its
    block; slots: int64 [R, T]; key, value: [T, R * Hb, D]. ``ValueError`` for shapes that do not
    fit each other; ``IndexError``, with nothing written, for a slot that is not there.
    """
    num_blocks, _, _, size, heads, dim = kv_cache.shape
    tables, tokens = slots.shape
    shape = (tokens, tables * heads, dim)
    if not kv_cache[:1].is_contiguous():
        raise ValueError(f"store_kv: blocks of a cache {list(kv_cache.shape)} have to be dense")
    _check(kv_cache, slots, key, shape)
    _check(kv_cache, slots, value, shape)
    width = heads * dim * kv_cache.itemsize
    keys = kv_cache.data_ptr() + layer * 2 * size * width
    fault = ctypes.c_int64()
    call = _Call(
        key.data_ptr(),
        value.data_ptr(),
        keys,
        keys + size * width,
        slots.data_ptr(),
        ctypes.addressof(fault),
        key.stride(0) * key.itemsize,
        value.stride(0) * value.itemsize,
        kv_cache.stride(0) * kv_cache.itemsize,
        tokens,
        num_blocks,
        size,
        tables,
        width,
    )
    refusal = calls.slot_refusal("store_kv", fault, num_blocks, size)
    calls.run(load_library("store_kv"), "store_kv", call, refusal)


def store_queries(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """Log one layer's queries, as ``kvserve.kernels.store_kv``, except those of block 0.

    query_log: [num_blocks, Lb, tokens, Hb, D], a layer of a block dense, float32 or bfloat16;
    slots: int64 [R, T]; query: [T, R * Hb * group, D]. Errors as of ``store_kv``.
    """
    if query_log.dtype is torch.uint8:  # e4m3 numbers, which no CPU logs by itself
        return store_queries_torch(query_log, layer, slots, query)
    num_blocks, _, size, heads, dim = query_log.shape
    tables, tokens = slots.shape
    group = query.shape[1] // (tables * heads)
    if query_log.stride()[2:] != (heads * dim, dim, 1):
        raise ValueError(f"store_queries: a layer of a block is not dense: {query_log.stride()}")
    _check(query_log, slots, query, (tokens, tables * heads * group, dim))
    fault = ctypes.c_int64()
    call = _QueryCall(
        query.data_ptr(),
        query_log.data_ptr() + layer * query_log.stride(1) * query_log.itemsize,
        slots.data_ptr(),
        ctypes.addressof(fault),
        query.stride(0),
        query_log.stride(0),
        tokens,
        num_blocks,
        size,
        tables,
        heads,
        group,
        dim,
        query.dtype is torch.bfloat16,
    )
    refusal = calls.slot_refusal("store_queries", fault, num_blocks, size)
    calls.run(load_library("store_kv"), "store_queries", call, refusal)


def _check(cache: Tensor, slots: Tensor, new: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ``ValueError`` unless the kernels' assumptions hold."""
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
