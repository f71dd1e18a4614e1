"""A model's operations beside its matrix products, on a CPU: calls ``elementwise.cpp``.

The functions of ``kvserve.kernels.layer.elementwise``, for float32 and bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled

DTYPES = (torch.float32, torch.bfloat16)

_WORTH_A_THREAD = 32768  # elements: what torch gives each thread of its own operators


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [T, N], or [T, heads, N] with dense heads; weight: [N]."""
    _check("rms_norm", x, weight, fits=weight.shape == x.shape[-1:])
    return _run("rms_norm", x, torch.empty(x.shape, dtype=x.dtype), weight, None, eps)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and added: [T, N], weight: [N]."""
    whole = torch.empty_like(x)
    fits = added.shape == x.shape and weight.shape == x.shape[-1:] and x.is_contiguous()
    _check("add_rms_norm", x, added, weight, fits=fits)
    return whole, _run("add_rms_norm", x, torch.empty_like(x), weight, added, eps, whole)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``rms_norm``, with a float32 weight."""
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()
    _check("wide_rms_norm", x, fits=fits and weight.dtype is torch.float32)
    return _run("wide_rms_norm", x, torch.empty(x.shape, dtype=x.dtype), weight, None, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D] with dense heads, cos and sin: [T, 1, D]."""
    tokens, _, dim = x.shape
    fits = cos.shape == sin.shape == (tokens, 1, dim) and dim % 2 == 0
    _check("rotate", x, cos, sin, fits=fits)
    return _run("rotate", x, torch.empty(x.shape, dtype=x.dtype), cos, sin)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 N]."""
    return _activated("silu_and_mul", gate_up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 N]."""
    return _activated("gelu_and_mul", gate_up)


def scale(x: Tensor, factor: float) -> Tensor:
    """x: [T, N], or [T, heads, N] with dense heads."""
    _check("scale", x, fits=True)
    return _run("scale", x, torch.empty(x.shape, dtype=x.dtype), None, None, factor)


def add(x: Tensor, added: Tensor) -> Tensor:
    """x and added: [T, N], dense."""
    _check("add", x, added, fits=x.shape == added.shape and x.is_contiguous())
    return _run("add", x, torch.empty_like(x), None, added)


def argmax(x: Tensor) -> Tensor:
    """x: [T, N] -> int64 [T]."""
    _check("argmax", x, fits=x.shape[1] > 0)
    return _run("argmax", x, torch.empty(x.shape[:1], dtype=torch.int64))


def take_rows(table: Tensor, places: Tensor) -> Tensor:
    """table: [N, W], dense, places: int64 [T] -> [T, W]. ``IndexError`` for a row that is not
    there."""
    rows, width = table.shape
    out = torch.empty(places.shape[0], width, dtype=table.dtype)
    if not (table.is_contiguous() and places.is_contiguous() and places.dtype is torch.int64):
        raise ValueError(f"take_rows: places of {places.dtype}, or a table that is not dense")
    sizes = places.shape[0], rows, width * table.itemsize
    _compiled("take_rows")(table, places, out, *sizes, refused=f"row {{}} of a table of {rows}")
    return out


def _activated(name: str, gate_up: Tensor) -> Tensor:
    tokens, both = gate_up.shape
    _check(name, gate_up, fits=both % 2 == 0)
    out = torch.empty(tokens, both // 2, dtype=gate_up.dtype)
    return _run(name, gate_up, out, width=both // 2)


def _run(
    name: str,
    x: Tensor,
    out: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    eps: float = 0.0,
    whole: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """Fill ``out``; ``width``: of a row's result, if that is not x's."""
    groups = x.shape[0]  # not len(), which is slow for a tensor
    threads = max(1, min(torch.get_num_threads(), x.numel() // _WORTH_A_THREAD))
    _compiled(name)(
        *(x, a, b, out, whole),
        *(groups, 1 if x.dim() == 2 else x.shape[1], width or x.shape[-1], x.stride(0)),
        *(x.dtype is torch.bfloat16, threads, eps),
    )
    return out


@cache
def _compiled(name: str) -> Compiled:
    return Compiled(name, "elementwise")


def _check(name: str, x: Tensor, *others: Tensor, fits: bool) -> None:
    """Raise ``ValueError`` unless the kernel's assumptions hold."""
    dtype = x.dtype
    dense, alike = x.stride(-1) == 1, dtype in DTYPES
    if x.dim() == 3:
        dense = dense and x.stride(1) == x.shape[2]
    for other in others:
        dense, alike = dense and other.is_contiguous(), alike and other.dtype is dtype
    if not (fits and dense):
        shapes = [list(tensor.shape) for tensor in (x, *others)]
        raise ValueError(f"{name}: shapes {shapes} do not fit, or rows are not dense")
    if not alike:
        dtypes = [str(tensor.dtype) for tensor in (x, *others)]
        raise ValueError(f"{name}: dtypes {dtypes}; all float32 or all bfloat16 are needed")
