"""What stands for dropped entries, by queries logged in 4 bits: calls ``fitted_remainder.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls, window_scores
from kvserve.kernels.cpu.build import load_library, why_missing
from kvserve.kernels.cpu.window_scores import five_dims
from kvserve.kernels.int4_log import Int4Queries
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Given

_POINTERS = (
    *("codes", "scales", "log_sums", "given", "dropped", "keys", "values"),
    *("out_keys", "out_values", "bias"),
)
_NUMBERS = (
    *("outer", "inner", "num_heads", "num_kv_heads", "window", "length", "dim"),
    *("is_bf16", "num_threads"),
)


class _Call(ctypes.Structure):
    """``FittedRemainder`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_strides", ctypes.c_int64 * 4) for name in ("codes", "key", "value")),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def takes(query: Int4Queries, key: Tensor, value: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these tensors."""
    if not all(window_scores.takes(query, x) for x in (key, value)) or key.dtype is not value.dtype:
        return False
    return why_missing("fitted_remainder") is None


def fitted_remainder(
    query: Int4Queries, key: Tensor, value: Tensor, dropped: Tensor, given: Given, scale: float
) -> Remainder:
    """As ``kernels.scores.fitted_remainder``, whose function of torch is the reference."""
    *lead, heads, window, dim = query.shape
    codes, keys, values = (five_dims(x) for x in (query.codes, key, value))
    kv_heads, length = keys.shape[2:4]
    scales = query.scales[..., 0].float().mul_(scale)
    dense = [x.contiguous() for x in (scales, given.log_sums, given.keys, dropped)]
    means = scales.new_empty(2, *lead, kv_heads, dim)
    left = Remainder(means[0], means[1], scales.new_empty(*lead, kv_heads))
    call = _Call(
        *(x.data_ptr() for x in (codes, *dense, keys, values, *left)),
        *((ctypes.c_int64 * 4)(*x.stride()[:4]) for x in (codes, keys, values)),
        *codes.shape[:2],
        *(heads, kv_heads, window, length, dim),
        key.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    calls.run(load_library("fitted_remainder"), "fitted_remainder", call)
    return left
