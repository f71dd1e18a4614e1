"""A model's operators besides matrix products: compiled on a CPU, Triton's kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from kvserve.folders import install
from kvserve.kernels.build import why_missing
from kvserve.kernels.layer import elementwise_cpu as compiled
from kvserve.late import LateModule

elementwise = LateModule("kernels.layer.elementwise")
on_triton = LateModule("kernels.layer.elementwise_triton")


@dataclass(frozen=True, slots=True)
class Operators:
    """Functions of ``layer/elementwise.py``; ``name``, ``reason`` for the start-up table."""

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

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of the last dimension, in float32 throughout if the weights are float32 alone."""
        norm = self.rms_norm if weight.dtype is x.dtype else self.wide_rms_norm
        return norm(x, weight, eps)

    def add_and_norm(
        self, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The sum, if anything is to be added, and its norm."""
        if added is not None and weight.dtype is hidden.dtype:
            return self.add_rms_norm(hidden, added, weight, eps)
        hidden = hidden if added is None else self.add(hidden, added)
        return hidden, self.norm(hidden, weight, eps)

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1.0 else self.scale(x, factor)


def select_operators(dtype: torch.dtype, device: str) -> Operators:
    """The fastest for this type and device."""
    how = "norms, rotation and activation in one pass each"
    if device == "cuda":
        if find_spec("triton") is None:
            return Operators("torch", f"Triton is not installed: {install('cuda')}")
        return Operators("triton", how, *TRITON)
    if device != "cpu" or dtype not in compiled.DTYPES:
        return Operators("torch", "compiled ones are for float32 and bfloat16 on a CPU")
    reason = why_missing("elementwise")
    if reason is not None:
        return Operators("torch", f"compiled ones are not there: {reason}")
    return Operators("compiled", how, *COMPILED)


TRITON = (
    on_triton.rms_norm_triton,
    on_triton.add_rms_norm_triton,
    on_triton.rotate_triton,
    on_triton.silu_and_mul_triton,
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
