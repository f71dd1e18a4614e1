"""Logging queries in 4 bits on a CPU, and reading them: calls ``query_log.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library
from kvserve.kernels.int4_log import Int4Kernels, Int4Queries

_POINTERS = ("query", "shares", "codes", "scales", "slots", "fault")
_NUMBERS = (
    *("query_stride", "codes_stride", "scales_stride"),
    *("num_tokens", "num_blocks", "block_size", "num_tables", "heads", "dim", "is_bf16"),
)
_LARGEST_DIM = 256


class _Call(ctypes.Structure):
    """``StoreInt4`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


class _GatherCall(ctypes.Structure):
    """``GatherInt4`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "slots", "layers")),
        *((name, ctypes.c_void_p) for name in ("codes_out", "scales_out", "fault")),
        *((f"{part}_stride", ctypes.c_int64) for part in ("codes", "scales")),
        *((f"{part}_layer_stride", ctypes.c_int64) for part in ("codes", "scales")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_heads", "length")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "block_layers", "block_size")),
        *((name, ctypes.c_int64) for name in ("heads", "dim")),
    )


def store_int4(log: Int4Queries, layer: int, slots: Tensor, query: Tensor, shares: Tensor) -> None:
    """Log one layer's queries, as ``kvserve.kernels.int4_log``, except those of block 0.

    log: [num_blocks, Lb, tokens, Hb, ...]; slots: int64 [R, T]; query: [T, R * Hb, D], float32 or
    bfloat16; shares: float32 [T, R * Hb]. ``ValueError`` for shapes that do not fit each other;
    ``IndexError``, with nothing written, for a slot that is not there.
    """
    num_blocks, _, size, heads, half = log.codes.shape
    tables, tokens = slots.shape
    dim, width = 2 * half, tables * heads
    dense = slots.is_contiguous() and shares.is_contiguous() and query.stride()[1:] == (dim, 1)
    if query.shape != (tokens, width, dim) or shares.shape != (tokens, width) or not dense:
        raise ValueError(
            f"store_int4: queries {list(query.shape)} and shares {list(shares.shape)} for slots "
            f"{list(slots.shape)} of a log {list(log.shape)}: {[tokens, width, dim]} and "
            f"{[tokens, width]} are needed, each tensor dense"
        )
    kinds = query.dtype in (torch.float32, torch.bfloat16) and shares.dtype is torch.float32
    if not kinds or slots.dtype is not torch.int64 or dim % 8 or dim > _LARGEST_DIM:
        raise ValueError(
            f"store_int4: queries of {query.dtype}, shares of {shares.dtype}, slots of "
            f"{slots.dtype}: float32 or bfloat16 of up to {_LARGEST_DIM} dimensions, float32 and "
            "int64 are needed"
        )
    codes, scales = log.codes[:, layer], log.scales[:, layer]
    fault = ctypes.c_int64()
    call = _Call(
        query.data_ptr(),
        shares.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        slots.data_ptr(),
        ctypes.addressof(fault),
        query.stride(0),
        codes.stride(0),
        scales.stride(0),
        tokens,
        num_blocks,
        size,
        tables,
        heads,
        dim,
        query.dtype is torch.bfloat16,
    )
    refusal = calls.slot_refusal("store_int4", fault, num_blocks, size)
    calls.run(load_library("query_log"), "store_int4", call, refusal)


def gather_int4(log: Int4Queries, slots: Tensor, layer_ids: Tensor | None = None) -> Int4Queries:
    """Logged queries as they are, as ``kvserve.kernels.int4_log``: [L', Hlog, S, ...].

    slots: int64 [L', Hlog, S]. ``IndexError``, with nothing read, for a slot that is not there.
    """
    num_blocks, layers, size, heads, half = log.codes.shape
    slots = slots.to(torch.int64).contiguous()
    ids = None if layer_ids is None else layer_ids.to(torch.int64).contiguous()
    found = Int4Queries(
        log.codes.new_empty(*slots.shape, half), log.scales.new_empty(*slots.shape, 2)
    )
    fault = ctypes.c_int64()
    call = _GatherCall(
        *(x.data_ptr() for x in (*log, slots)),
        None if ids is None else ids.data_ptr(),
        *(x.data_ptr() for x in found),
        ctypes.addressof(fault),
        *(x.stride(at) for at in (0, 1) for x in log),
        *slots.shape,
        *(num_blocks, layers, size, heads, 2 * half),
    )
    refusal = calls.slot_refusal("gather_int4", fault, num_blocks, size)
    calls.run(load_library("query_log"), "gather_int4", call, refusal)
    return found


COMPILED = Int4Kernels(store_int4, gather_int4)
