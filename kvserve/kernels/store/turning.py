"""Turning vectors of heads by a Hadamard matrix, whose inverse is itself: no number of a turned
vector is much larger than the others, so that few bits hold them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels.cpu.calls import Compiled
from kvserve.kernels.dispatch import Helper, Kernel

if TYPE_CHECKING:
    import triton.language as tl

_TURN = Compiled("turn_heads", "few_bits")
_ROWS = 16
EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""How kernels are compiled that round as references do."""


def turn_torch(x: Tensor, mean: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """H (x - mean), in float32, as ``dtype`` (default: that of x); the reference.

    x: [..., heads, D]; mean: float32 [heads, D]. H is Sylvester's matrix over the root of D; of a D
    that is no power of two, one of each power of two in it, the largest first. Sums are made of
    pairs of neighbours, then of neighbouring pairs, and so on.
    """
    turned = x.float() if mean is None else x.float() - mean
    parts = [_turned(part) for part in turned.split(powers_of_two(x.shape[-1]), dim=-1)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return whole.to(dtype or x.dtype)


def turn_cpu(x: Tensor, mean: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x: [T, heads, D] of float32 or bfloat16, heads dense."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=dtype or x.dtype)
    types = x.dtype is torch.bfloat16, out.dtype is torch.bfloat16
    if x.stride()[1:] != (dim, 1) or not {x.dtype, out.dtype} <= {torch.float32, torch.bfloat16}:
        raise ValueError(f"turn_heads: {x.dtype} {list(x.shape)}, strides {x.stride()}")
    _TURN(x, mean, out, tokens, heads, dim, x.stride(0), *types)
    return out


def powers_of_two(dim: int) -> list[int]:
    """Those that add up to ``dim``, the largest first."""
    return [1 << bit for bit in reversed(range(dim.bit_length())) if dim >> bit & 1]


def _turned(x: Tensor) -> Tensor:
    size, width = x.shape[-1], 1
    while width < size:
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        width *= 2
    return x * x.new_tensor(size**-0.5)


def turn_triton(x: Tensor, mean: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x: [T, heads, D], heads dense. A program takes 16 heads."""
    tokens, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1) or dim & (dim - 1):
        raise ValueError(
            f"turn_heads: {list(x.shape)}, strides {x.stride()}: heads are dense, of 2^n"
        )
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _turn_heads.launch(
        (-(-tokens * heads // _ROWS),),
        *(out, x, x if mean is None else mean, tokens * heads, heads, x.stride(0), dim**-0.5),
        DIM=dim,
        ROWS=_ROWS,
        MEAN=mean is not None,
        **EXACT,
    )
    return out


@Helper
def turned(x, shrink, DIM: tl.constexpr):
    """H x of vectors [N, DIM]: pairs of neighbours, neighbouring pairs, and so on."""
    channel = tl.arange(0, DIM)[None, :] + tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(8):
        if 1 << i < DIM:
            other = tl.gather(x, channel ^ (1 << i), 1)
            x = tl.where((channel >> i) % 2 == 0, x + other, other - x)
    return x * shrink


@Kernel
def _turn_heads(
    out,
    x,
    mean,
    rows,
    heads,
    token_stride,
    shrink,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)[None, :]
    real, token, head = (row < rows)[:, None], (row // heads).to(tl.int64), row % heads
    at = (token * token_stride + head * DIM)[:, None] + dims
    numbers = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if MEAN:
        numbers -= tl.load(mean + (head * DIM)[:, None] + dims)
    numbers = turned(numbers, shrink, DIM).to(out.dtype.element_ty)
    tl.store(out + (row.to(tl.int64) * DIM)[:, None] + dims, numbers, mask=real)
