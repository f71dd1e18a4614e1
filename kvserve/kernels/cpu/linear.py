"""Matrix products on a CPU with weights in panels: calls ``linear.cpp``.

oneDNN, with weights packed for it, is as fast from 256 tokens on, and slower for fewer
(``python -m bench.cpu_products``): it does not read ahead, and its operator takes time to start.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from kvserve.kernels.cpu.build import load_library

DTYPES = (torch.float32, torch.bfloat16)

_WORTH_A_THREAD = 2**17  # multiplications
_PIECE = 2**22  # numbers that are rearranged at a time


class _Call(ctypes.Structure):
    """``Linear`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "panels", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs", "outputs", "x_stride")),
        *((name, ctypes.c_int64) for name in ("is_bf16", "num_threads")),
    )


class Panels(nn.Parameter):
    """A weight [outputs, inputs], laid out as [panels, inputs / E, width, E].

    E is 1 for float32 and 2 for bfloat16; the last panel is filled up with zeros.
    """

    inputs: int
    outputs: int

    @classmethod
    def of(cls, weight: Tensor) -> Panels:
        """``weight`` [outputs, inputs], dense, rearranged in its own memory.

        It is copied only if its last panel has to be filled up.
        """
        outputs, inputs = weight.shape
        each = 4 // weight.itemsize
        if weight.dtype not in DTYPES or inputs % each or not weight.is_contiguous():
            raise ValueError(
                f"weight {[outputs, inputs]} of {weight.dtype}: dense float32, or bfloat16 with an "
                "even number of inputs, is needed"
            )
        width = load_library("linear").kvserve_panel_width()
        if outputs % width:
            weight = nn.functional.pad(weight, (0, 0, 0, -outputs % width))
        rows = weight.view(-1, width, inputs // each, each)
        values = weight.view(-1, inputs // each, width, each)
        some = max(1, _PIECE // rows[0].numel())
        for before, after in zip(rows.split(some), values.split(some), strict=True):
            turned = before.transpose(1, 2).clone(memory_format=torch.contiguous_format)
            after.copy_(turned)
        return cls._shaped(values, outputs, inputs)

    @classmethod
    def _shaped(cls, values: Tensor, outputs: int, inputs: int) -> Panels:
        panels = cls(values, requires_grad=False)
        panels.outputs, panels.inputs = outputs, inputs
        return panels

    def __deepcopy__(self, memo: dict[int, Any]) -> Panels:
        """A copy that knows its shape, which torch's own copy would lose."""
        if id(self) not in memo:
            memo[id(self)] = self._shaped(self.data.clone(), self.outputs, self.inputs)
        copied: Panels = memo[id(self)]
        return copied


def linear(x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """x: [T, inputs], bias: [outputs] -> [T, outputs]; a row does not depend on the others."""
    tokens, inputs, outputs = x.shape[0], panels.inputs, panels.outputs
    dtype = x.dtype
    if x.shape[1] != inputs or x.stride(1) != 1 or dtype is not panels.dtype:
        raise ValueError(
            f"linear: x {list(x.shape)} of {dtype} does not fit a weight {[outputs, inputs]} of "
            f"{panels.dtype}, or its rows are not dense"
        )
    if bias is not None and not (
        bias.shape == (outputs,) and bias.dtype is dtype and bias.is_contiguous()
    ):
        raise ValueError(
            f"linear: bias {list(bias.shape)} of {bias.dtype}: {outputs} dense {dtype} are needed"
        )
    y = torch.empty(tokens, outputs, dtype=dtype)
    threads = min(torch.get_num_threads(), tokens * inputs * outputs // _WORTH_A_THREAD)
    call = _Call(
        x.data_ptr(),
        panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        tokens,
        inputs,
        outputs,
        x.stride(0),
        dtype is torch.bfloat16,
        max(1, threads),
    )
    load_library("linear").kvserve_linear(ctypes.byref(call))
    return y
