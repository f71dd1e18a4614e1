"""Merging remainders in place, on a CPU: calls ``remainder.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing

_POINTERS = ("keys", "values", "bias", "rows", "more_keys", "more_values", "more_bias", "fault")
_NUMBERS = ("events", "layers", "num_rows", "heads", "dim")


class _Call(ctypes.Structure):
    """``AddRemainders`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def takes(keys: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes remainders with such ``keys [..., D]``."""
    if keys.device.type != "cpu" or keys.dtype is not torch.float32 or keys.shape[-1] % 8:
        return False
    return why_missing("remainder") is None


def add_remainders(
    whole: tuple[Tensor, Tensor, Tensor], rows: Tensor, more: tuple[Tensor, Tensor, Tensor]
) -> None:
    """As ``kernels.events.add_remainders``, whose function of torch is the reference.

    ``IndexError``, with nothing written, for a row that is not there.
    """
    keys, values, bias = whole
    if not all(x.is_contiguous() for x in whole):
        raise ValueError(f"add_remainders: remainders {list(keys.shape)} have to be dense")
    layers, num_rows, heads, dim = keys.shape
    rows = rows.to(torch.int64).contiguous()
    dense = [x.float().contiguous() for x in more]
    fault = ctypes.c_int64()
    call = _Call(
        *(x.data_ptr() for x in (keys, values, bias, rows, *dense)),
        ctypes.addressof(fault),
        *(len(rows), layers, num_rows, heads, dim),
    )

    def refusal(_: int) -> IndexError:
        return IndexError(f"add_remainders: row {fault.value} is not one of {num_rows}")

    calls.run(load_library("remainder"), "add_remainders", call, refusal)
