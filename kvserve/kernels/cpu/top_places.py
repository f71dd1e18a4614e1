"""The best of many scores, in the order of their places, on a CPU: ``top_places.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing


class _Call(ctypes.Structure):
    """``TopPlaces`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "length", "count", "stride", "num_threads")),
    )


def takes(scores: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these scores."""
    if scores.device.type != "cpu" or scores.dtype is not torch.float32:
        return False
    return why_missing("top_places") is None


def write_top_places(scores: Tensor, out: Tensor, count: int) -> None:
    """The places of the ``count`` best of ``scores [..., n]``, ascending, into the first ``count``
    of ``out`` int64 [..., m], which is dense. Ties go to the older place."""
    if count == 0 or not scores.numel():
        return
    scores = scores.contiguous()
    length = scores.shape[-1]
    rows = scores.numel() // length
    sizes = rows, length, count, out.shape[-1], torch.get_num_threads()
    call = _Call(scores.data_ptr(), out.data_ptr(), *sizes)
    calls.run(load_library("top_places"), "top_places", call)
