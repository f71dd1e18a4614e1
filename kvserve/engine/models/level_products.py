"""Products with levels, as they are stored or as they are laid out for this CPU, and with FP8."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from kvserve.engine.models.linear import Hold
from kvserve.folders import install
from kvserve.kernels.build import why_missing
from kvserve.kernels.layer import linear_cpu as compiled
from kvserve.kernels.layer.elementwise import quantize_rows
from kvserve.kernels.layer.elementwise_triton import quantize_rows_triton
from kvserve.kernels.layer.weight_levels import Levels, expert_linear_levels, linear_levels
from kvserve.kernels.layer.weight_levels_cpu import LevelPanels
from kvserve.late import LateModule

FP8 = torch.float8_e4m3fn
_FP8_ALIGNMENT = 16
_HAS_TRITON = find_spec("triton") is not None
_triton = LateModule("kernels.layer.weight_levels_triton")


def empty(hold: Hold, shape: tuple[int, ...]) -> Levels:
    """A matrix of this form, which is read later."""
    return Levels.empty(hold.form, shape, hold.inputs, hold.order)


def linear(x: Tensor, weight: Levels, bias: Tensor | None = None) -> Tensor:
    """x: [T, in], weight: [out, in] -> [T, out]."""
    if isinstance(weight, LevelPanels):
        return weight.linear(x, bias)
    if weight.form.e4m3 and weight.form.rounds:
        product = multiply_fp8(x, weight.levels.data.view(FP8), weight.scales)
        return product if bias is None else product + bias
    multiply = _triton.linear_levels_triton if x.is_cuda else linear_levels
    multiplied: Tensor = multiply(x, weight, bias)
    return multiplied


def expert_linear(x: Tensor, weight: Levels, ends: Tensor) -> Tensor:
    """x: [N, in], sorted by expert, weight: [E, out, in] -> [N, out]."""
    if isinstance(weight, LevelPanels):
        return weight.expert_linear(x, ends)
    multiply = _triton.expert_linear_levels_triton if x.is_cuda else expert_linear_levels
    multiplied: Tensor = multiply(x, weight, ends)
    return multiplied


def take_rows(table: Levels, places: Tensor) -> Tensor:
    """table: [N, W], places: int64 [T] -> [T, W]."""
    if isinstance(table, LevelPanels):
        return table.take_rows(places)
    return table.numbers(places).to(table.dtype)


def packed(weight: Levels, product: str) -> Levels:
    """The weight as ``product`` wants it."""
    keep = weight.device.type != "cpu" or product == "torch" or isinstance(weight, LevelPanels)
    return weight if keep else LevelPanels(weight)


def can_multiply_fp8(dtype: torch.dtype, device: str, *sizes: int) -> bool:
    """Whether this machine multiplies FP8 matrices of these sizes, with results in ``dtype``."""
    if device != "cuda" or dtype != torch.bfloat16 or any(size % _FP8_ALIGNMENT for size in sizes):
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def multiply_fp8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """x: bfloat16 [T, in], each token rounded to FP8 at a scale of its own; weight: FP8 [out, in],
    as it is stored; scales: float32 [out, 1] -> [T, out]."""
    quantize = quantize_rows_triton if x.is_cuda and _HAS_TRITON else quantize_rows
    rounded, by_token = quantize(x)
    product: Tensor = torch._scaled_mm(rounded, weight.t(), by_token, scales.t(), out_dtype=x.dtype)
    return product


def select_level_product(dtype: torch.dtype, device: str) -> tuple[str, str]:
    """What multiplies levels, ``"compiled"`` or ``"triton"``, and how; or nothing, and why."""
    if device == "cuda":
        if find_spec("triton") is None:
            return "", f"products with levels need Triton: {install('cuda')}"
        return "triton", "levels are widened as they are read"
    if device != "cpu" or dtype not in compiled.DTYPES:
        return "", "products with levels are for float32 and bfloat16 on a CPU"
    missing = why_missing("linear_levels")
    if missing is not None:
        return "", f"compiled products with levels are not there: {missing}"
    return "compiled", "levels are widened in registers"
