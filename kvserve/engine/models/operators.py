"""A model's operators besides matrix products: compiled on a CPU, Triton's kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from kvserve.kernels import elementwise
from kvserve.kernels.cpu import elementwise as compiled
from kvserve.kernels.cpu.build import why_missing


@dataclass(frozen=True, slots=True)
class Operators:
    """Functions of ``kvserve.kernels.elementwise``; ``name``, ``reason`` for the start-up table."""

    name: str
    reason: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = elementwise.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = (
        elementwise.add_rms_norm
    )
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = elementwise.rotate
    silu_and_mul: Callable[[Tensor], Tensor] = elementwise.silu_and_mul
    argmax: Callable[[Tensor], Tensor] = elementwise.argmax
    take_rows: Callable[[Tensor, Tensor], Tensor] = elementwise.take_rows
    wide_rms_norm: Callable[[Tensor, Tensor, float], Tensor] = elementwise.wide_rms_norm
    gelu_and_mul: Callable[[Tensor], Tensor] = elementwise.gelu_and_mul
    scale: Callable[[Tensor, float], Tensor] = elementwise.scale
    add: Callable[[Tensor, Tensor], Tensor] = elementwise.add


def select_operators(dtype: torch.dtype, device: str) -> Operators:
    """The fastest for this type and device."""
    how = "norms, rotation and activation in one pass each"
    if device == "cuda":
        if find_spec("triton") is None:
            return Operators("torch", "Triton is not installed: pip install 'kvserve[cuda]'")
        return Operators("triton", how, *TRITON)
    if device != "cpu" or dtype not in compiled.DTYPES:
        return Operators("torch", "compiled ones are for float32 and bfloat16 on a CPU")
    reason = why_missing("elementwise")
    if reason is not None:
        return Operators("torch", f"compiled ones are not there: {reason}")
    return Operators("compiled", how, *COMPILED)


TRITON = (
    elementwise.rms_norm_triton,
    elementwise.add_rms_norm_triton,
    elementwise.rotate_triton,
    elementwise.silu_and_mul_triton,
)
COMPILED = (
    compiled.rms_norm,
    compiled.add_rms_norm,
    compiled.rotate,
    compiled.silu_and_mul,
    compiled.argmax,
    compiled.take_rows,
    compiled.wide_rms_norm,
    compiled.gelu_and_mul,
    compiled.scale,
    compiled.add,
)
