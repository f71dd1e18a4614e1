"""Gathering and moving entries on a CPU: calls ``move_kv.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.compact_kv import MoveKernels
from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library

_POINTERS = ("cache", "src", "dst", "layers", "out", "fault")
_NUMBERS = (
    *("num_layers", "num_heads", "length"),
    *("num_blocks", "block_layers", "block_size", "block_heads", "width", "values"),
)


class _Call(ctypes.Structure):
    """``MoveKV`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def gather_keys(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """As ``kernels.gather_kv``, whose function of torch is the reference.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D], dense; slots: int64 [L', Hkv, S] -> [L', Hkv, S, D].
    ``IndexError``, with nothing read, for a slot that is not there.
    """
    return _gather(kv_cache, slots, layer_ids, values=False)


def gather_values(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """As ``gather_keys``, of values."""
    return _gather(kv_cache, slots, layer_ids, values=True)


def _gather(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None, *, values: bool) -> Tensor:
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0])
    out = kv_cache.new_empty(*slots.shape, kv_cache.shape[-1])
    slots, layer_ids = (x.to(torch.int64).contiguous() for x in (slots, layer_ids))
    _run("gather_kv", kv_cache, slots, None, layer_ids, out, values)
    return out


def move_kv(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries ``src`` to ``dst``, one after the other, as ``kernels.compact_kv``.

    src, dst: int64 [L, Hkv, S]. ``IndexError``, with nothing written, for a slot that is not there.
    """
    if src.shape != dst.shape:
        raise ValueError(f"move_kv: slots {list(src.shape)} to {list(dst.shape)}")
    src, dst = (x.to(torch.int64).contiguous() for x in (src, dst))
    _run("move_kv", kv_cache, src, dst, None, None, False)


def _run(
    name: str,
    kv_cache: Tensor,
    src: Tensor,
    dst: Tensor | None,
    layer_ids: Tensor | None,
    out: Tensor | None,
    values: bool,
) -> None:
    num_blocks, layers, _, size, heads, dim = kv_cache.shape
    if not kv_cache.is_contiguous():
        raise ValueError(f"{name}: blocks of a cache {list(kv_cache.shape)} have to be dense")
    fault = ctypes.c_int64()
    call = _Call(
        kv_cache.data_ptr(),
        src.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (dst, layer_ids, out)),
        ctypes.addressof(fault),
        *src.shape,
        *(num_blocks, layers, size, heads, dim * kv_cache.itemsize),
        values,
    )
    refusal = calls.slot_refusal(name, fault, num_blocks, size)
    calls.run(load_library("move_kv"), name, call, refusal)


COMPILED = MoveKernels(gather_keys, gather_values, move_kv)
