"""Rotary position embedding, on logical positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvserve.engine.models.spec import ModelSpec


def inverse_frequencies(spec: ModelSpec) -> Tensor:
    """float32 [D/2]. Types: default, linear, llama3 (as defined by transformers)."""
    rope = spec.rope
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inv_freq = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return inv_freq / float(rope.parameters["factor"])
    if rope.kind == "llama3":
        return _llama3(inv_freq, {name: float(v) for name, v in rope.parameters.items()})
    return inv_freq


def _llama3(inv_freq: Tensor, p: dict[str, float]) -> Tensor:
    """Slow frequencies are divided by ``factor``, fast ones kept, those between interpolated."""
    original, low, high = (
        p["original_max_position_embeddings"],
        p["low_freq_factor"],
        p["high_freq_factor"],
    )
    wavelength = 2 * math.pi / inv_freq
    smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / p["factor"] + smooth * inv_freq


class Rotary:
    """Cosines and sines of every position, computed once in float32."""

    def __init__(self, spec: ModelSpec, max_len: int, dtype: torch.dtype, device: str) -> None:
        angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(spec))
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        self._cos = angles.cos().to(device, dtype)
        self._sin = angles.sin().to(device, dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [T] -> cos, sin: [T, 1, D]."""
        return self._cos[positions], self._sin[positions]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D], rotated in halves."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
