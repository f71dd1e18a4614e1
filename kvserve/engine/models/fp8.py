"""Weights held and multiplied as FP8 (e4m3): a scale per output, and one per token for activations.

They take half the memory of bfloat16, and half the bytes to read in a decode step, on GPUs whose
tensor cores multiply FP8. Every token is rounded to FP8 at a scale of its own before it is
multiplied.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from kvserve.kernels.elementwise import quantize_rows, quantize_rows_triton

FP8 = torch.float8_e4m3fn
_ALIGNMENT = 16
_HAS_TRITON = find_spec("triton") is not None


def can_multiply(dtype: torch.dtype, device: str, *sizes: int) -> bool:
    """Whether this machine multiplies FP8 matrices of these sizes, with results in ``dtype``."""
    if device != "cuda" or dtype != torch.bfloat16 or any(size % _ALIGNMENT for size in sizes):
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def multiply(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x: bfloat16 [T, in]; weight: FP8 [out, in]; scales: float32 [out, 1] -> [T, out]."""
    quantize = quantize_rows_triton if x.is_cuda and _HAS_TRITON else quantize_rows
    rounded, by_token = quantize(x)
    product: Tensor = torch._scaled_mm(rounded, weight.t(), by_token, scales.t(), out_dtype=x.dtype)
    return product
