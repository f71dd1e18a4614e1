"""Entries held as levels, on a CPU: calls ``quantized_entries.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library
from kvserve.kernels.quantized_entries import QuantizedBlocks, QuantizedKernels

DTYPES = (torch.float32, torch.bfloat16)


class _Held(ctypes.Structure):
    """``Held`` of the C++ file, field by field, as are those below."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("levels", "steps", "lows")),
        *((name, ctypes.c_int64) for name in ("bits", "e4m3", "groups")),
    )


class _Blocks(ctypes.Structure):
    _fields_ = (
        *(("keys", _Held), ("values", _Held)),
        *((name, ctypes.c_int64) for name in ("block_stride", "layer_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("num_blocks", "num_layers", "block_size")),
        *((name, ctypes.c_int64) for name in ("heads", "dim")),
    )


class _Store(ctypes.Structure):
    _fields_ = (
        ("blocks", _Blocks),
        *((name, ctypes.c_void_p) for name in ("key", "value", "slots", "fault")),
        *((name, ctypes.c_int64) for name in ("key_stride", "value_stride", "layer")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_tables", "is_bf16")),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("blocks", _Blocks),
        *((name, ctypes.c_void_p) for name in ("out", "slots", "layers", "fault")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_heads", "length")),
        *((name, ctypes.c_int64) for name in ("values", "is_bf16")),
    )


class _Move(ctypes.Structure):
    _fields_ = (
        ("blocks", _Blocks),
        *((name, ctypes.c_void_p) for name in ("src", "dst", "fault")),
        *((name, ctypes.c_int64) for name in ("num_layers", "num_heads", "length")),
    )


def store_quantized(
    blocks: QuantizedBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Round and store one layer's new entries; ``store_quantized_torch`` is the reference.

    slots: int64 [R, T]; key, value: [T, R * Hb, D], float32 or bfloat16. ``ValueError`` for shapes
    that do not fit each other; ``IndexError``, with nothing written, for a slot that is not there.
    """
    tables, tokens = slots.shape
    *_, heads, dim = blocks.keys.shape
    shape = tokens, tables * heads, dim
    for new in (key, value):
        if new.shape != shape or new.stride()[1:] != (dim, 1) or new.dtype not in DTYPES:
            raise ValueError(
                f"store_quantized: new entries of {new.dtype} {list(new.shape)} for slots "
                f"{list(slots.shape)}: {list(shape)} of {DTYPES} is needed, tokens dense"
            )
    fault = ctypes.c_int64()
    call = _Store(
        _blocks(blocks),
        key.data_ptr(),
        value.data_ptr(),
        _long(slots).data_ptr(),
        ctypes.addressof(fault),
        key.stride(0),
        value.stride(0),
        layer,
        tokens,
        tables,
        key.dtype is torch.bfloat16,
    )
    _run("store_levels", call, fault, blocks)


def gather_quantized(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """Keys (or values) as numbers; ``gather_quantized_torch`` is the reference.

    slots: int64 [L', Hkv, S] -> [L', Hkv, S, D]. ``IndexError`` as of the store.
    """
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0])
    out = torch.empty(*slots.shape, blocks.keys.shape[-1], dtype=dtype)
    fault = ctypes.c_int64()
    slots, layer_ids = _long(slots), _long(layer_ids)
    call = _Gather(
        _blocks(blocks),
        *(x.data_ptr() for x in (out, slots, layer_ids)),
        ctypes.addressof(fault),
        *slots.shape,
        values,
        dtype is torch.bfloat16,
    )
    _run("gather_levels", call, fault, blocks)
    return out


def move_quantized(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries bit for bit, one after the other; ``move_quantized_torch`` is the reference.

    src, dst: int64 [L, Hkv, S]; no destination is the source of a later entry of its run, or of any
    entry of another of the ``runs``. What goes to block 0 is not used. ``IndexError`` as of the
    store.
    """
    src, dst = _long(src), _long(dst)
    if src.shape != dst.shape:
        raise ValueError(f"move_quantized: slots {list(src.shape)} to {list(dst.shape)}")
    fault = ctypes.c_int64()
    places = src.data_ptr(), dst.data_ptr(), ctypes.addressof(fault)
    _run("move_levels", _Move(_blocks(blocks), *places, *src.shape), fault, blocks)


def _run(name: str, call: ctypes.Structure, fault: ctypes.c_int64, blocks: QuantizedBlocks) -> None:
    num_blocks, _, size, *_ = blocks.keys.shape
    refusal = calls.slot_refusal(name, fault, num_blocks, size)
    calls.run(load_library("quantized_entries"), name, call, refusal)


def _blocks(blocks: QuantizedBlocks) -> _Blocks:
    num_blocks, layers, size, heads, dim = blocks.keys.shape
    held = (
        _Held(
            *(part.data_ptr() for part in x.parts),
            *[None] * (3 - len(x.parts)),
            *(x.form.bits, x.form.e4m3, x.step.shape[-1]),
        )
        for x in (blocks.keys, blocks.values)
    )
    strides = blocks.pool.stride(0), blocks.pool.stride(1), blocks.lane_bytes
    return _Blocks(*held, *strides, num_blocks, layers, size, heads, dim)


def _long(x: Tensor) -> Tensor:
    return x.to(torch.int64).contiguous()


COMPILED = QuantizedKernels(store_quantized, gather_quantized, move_quantized)
