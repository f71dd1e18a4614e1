"""``turning.py`` in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Helper, Kernel

if TYPE_CHECKING:
    import triton.language as tl

_ROWS = 16
EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
"""How kernels are compiled that round as references do."""


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
    length,
    heads,
    token_stride,
    shrink,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)[None, :]
    real, token, head = (row < length)[:, None], (row // heads).to(tl.int64), row % heads
    at = (token * token_stride + head * DIM)[:, None] + dims
    numbers = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if MEAN:
        numbers -= tl.load(mean + (head * DIM)[:, None] + dims)
    numbers = turned(numbers, shrink, DIM).to(out.dtype.element_ty)
    tl.store(out + (row.to(tl.int64) * DIM)[:, None] + dims, numbers, mask=real)
