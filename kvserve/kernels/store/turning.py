"""Turning vectors of heads by a Hadamard matrix, whose inverse is itself: no number of a turned
vector is much larger than the others, so that few bits hold them all."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled

_TURN = Compiled("turn_heads", "few_bits")


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
