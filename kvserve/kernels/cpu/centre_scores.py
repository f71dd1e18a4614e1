"""Keys scored by where queries usually point, on a CPU: ``centre_scores.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing

DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS = (
    *("events", "layers", "heads", "kv_heads", "futures", "length", "dim"),
    *("normalise", "is_bf16", "num_threads"),
)
_LARGEST_DIM = 256


class _Call(ctypes.Structure):
    """``CentreScores`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "vectors", "spread", "out")),
        ("key_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def takes(key: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these keys."""
    dim = key.shape[-1]
    if key.device.type != "cpu" or key.dtype not in DTYPES or dim % 16 or dim > _LARGEST_DIM:
        return False
    return key.stride(-1) == 1 and why_missing("centre_scores") is None


def centre_scores(key: Tensor, vectors: Tensor, spread: Tensor, normalise: bool = True) -> Tensor:
    """As ``kernels.scores.centre_scores``, whose ``centre_scores_torch`` is the reference."""
    events, layers, kv_heads, length, dim = key.shape
    vectors, spread = (x.float().contiguous() for x in (vectors, spread))
    out = torch.empty(events, layers, kv_heads, length)
    call = _Call(
        *(x.data_ptr() for x in (key, vectors, spread, out)),
        (ctypes.c_int64 * 4)(*key.stride()[:4]),
        *(events, layers, vectors.shape[2], kv_heads, vectors.shape[3], length, dim),
        *(normalise, key.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    calls.run(load_library("centre_scores"), "centre_scores", call)
    return out
