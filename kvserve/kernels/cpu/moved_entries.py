"""Which entries events move, on a CPU: calls ``moved_entries.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing


class _Call(ctypes.Structure):
    """``MovedEntries`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("kept", "numbers", "out")),
        ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("events", "layers", "heads", "num_kept", "length")),
    )


def takes(kept: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these entries."""
    if kept.device.type != "cpu" or kept.dtype is not torch.int64:
        return False
    return why_missing("moved_entries") is None


def moved_entries(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """As ``kernels.events.moved_entries``, whose function of torch is the reference."""
    numbers = numbers.to(torch.int64).contiguous()
    out = torch.empty(*kept.shape[:-1], length, dtype=torch.int64)
    call = _Call(
        *(x.data_ptr() for x in (kept, numbers, out)),
        (ctypes.c_int64 * 4)(*kept.stride()),
        *kept.shape,
        length,
    )
    calls.run(load_library("moved_entries"), "moved_entries", call)
    return out
