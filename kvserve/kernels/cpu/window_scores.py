"""Scores of a window whose queries are logged in 4 bits, on a CPU: ``window_scores.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.checks import AGGREGATES, GROUP_AGGREGATES
from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing
from kvserve.kernels.int4_log import Int4Queries
from kvserve.kernels.shares import Given, Seen

DTYPES = (torch.float32, torch.bfloat16)
_POINTERS = ("codes", "scales", "shares", "keys", "out", "log_sums", "given")
_NUMBERS = (
    *("outer", "inner", "num_heads", "num_kv_heads", "window", "length", "later", "dim"),
    *("first", "step", "span", "aggregate", "pool", "is_bf16", "num_threads"),
)
_LARGEST_DIM = 256


class _Call(ctypes.Structure):
    """``WindowScores`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64 * 4) for name in ("codes_strides", "key_strides")),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def takes(query: Int4Queries, key: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these tensors."""
    if (
        key.device.type != "cpu"
        or key.dtype not in DTYPES
        or key.shape[-1] % 8
        or key.shape[-1] > _LARGEST_DIM
    ):
        return False
    dense = key.stride(-1) == query.codes.stride(-1) == 1
    return dense and why_missing("window_scores") is None


def window_scores(
    query: Int4Queries,
    key: Tensor,
    scale: float,
    aggregate: str = "sum",
    group_aggregate: str = "mean",
    seen: Seen | None = None,
    beside: Given | None = None,
) -> Tensor:
    """As ``kernels.scores.window_scores``, whose ``window_scores_torch`` is the reference."""
    *lead, heads, window, _ = query.shape
    kv_heads, held, dim = key.shape[-3:]
    length = held if seen is None else held - seen.later
    codes, keys = (five_dims(x) for x in (query.codes, key))
    scales = query.scales[..., 0].float().mul_(scale).contiguous()
    shares = None if seen is None else seen.shares.float().contiguous()
    out = torch.empty(*lead, kv_heads, length)
    call = _Call(
        codes.data_ptr(),
        scales.data_ptr(),
        None if shares is None else shares.data_ptr(),
        keys.data_ptr(),
        out.data_ptr(),
        *((None, None) if beside is None else (x.data_ptr() for x in beside)),
        (ctypes.c_int64 * 4)(*codes.stride()[:4]),
        (ctypes.c_int64 * 4)(*keys.stride()[:4]),
        *keys.shape[:2],
        heads,
        kv_heads,
        window,
        length,
        held - length,
        dim,
        *((0, 1, 1) if seen is None else (seen.first, seen.step, seen.span)),
        AGGREGATES.index(aggregate),
        GROUP_AGGREGATES.index(group_aggregate),
        key.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    calls.run(load_library("window_scores"), "window_scores", call)
    return out


def five_dims(x: Tensor) -> Tensor:
    while x.dim() < 5:
        x = x[None]
    return x.flatten(0, -5)
