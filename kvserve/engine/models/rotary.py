"""Rotary position embedding, on logical positions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvserve.engine.models.spec import RopeSpec

TakeRows = Callable[[Tensor, Tensor], Tensor]
"""``take_rows`` of ``kvserve.kernels.layer.elementwise``, or another that does the same."""


class Rotary:
    """Cosines and sines of any positions, made in float32 as transformers makes them.

    Types default, linear, llama3 and yarn fix the frequencies once. Under dynamic NTK they follow
    the length of the sequence once that exceeds the original context: a prompt's tokens take the
    whole prompt's length, however it is cut into chunks, and a generated token the length up to
    itself. A cached key keeps the rotation it was stored with.
    """

    def __init__(self, rope: RopeSpec, head_dim: int, dtype: torch.dtype, device: str) -> None:
        self._rope, self._dim, self._dtype = rope, head_dim, dtype
        self._exponents = _exponents(head_dim).to(device)
        self._inv_freq = inverse_frequencies(rope, head_dim).to(device)
        self.factor = attention_factor(rope)
        """What rotated queries and keys are multiplied by, beside the rotation."""
        self._table: tuple[Tensor, Tensor] | None = None
        self._take_rows: TakeRows

    def tabulate(self, max_len: int, take_rows: TakeRows) -> None:
        """Make the cosines and sines of positions up to ``max_len`` once, if these are all that
        they depend on; ``take_rows`` looks them up."""
        made = self._table is not None and len(self._table[0]) >= max_len
        if self._rope.kind == "dynamic" or made:
            return
        positions = torch.arange(max_len, device=self._inv_freq.device)
        cos, sin = (x[:, 0] for x in self._computed(positions, self._inv_freq))
        self._table, self._take_rows = (cos, sin), take_rows

    @property
    def inv_freq(self) -> Tensor | None:
        """float32 [D / 2], if they are the same for all positions and lengths."""
        return None if self._rope.kind == "dynamic" else self._inv_freq

    def at(self, positions: Tensor, prompt_lens: Tensor) -> tuple[Tensor, Tensor]:
        """positions, prompt_lens (of each token's sequence): [T] -> cos, sin: [T, 1, D]."""
        if self._table is not None:
            cos, sin = (self._take_rows(table, positions)[:, None] for table in self._table)
            return cos, sin
        inv_freq = self._inv_freq
        if self._rope.kind == "dynamic":  # the base grows with the length
            rope, dim, factor = self._rope, self._dim, self._rope.parameters["factor"]
            lengths = torch.maximum(prompt_lens, positions + 1)
            growth = factor * lengths.clamp(min=rope.original) / rope.original - (factor - 1)
            bases = (rope.theta * growth ** (dim / (dim - 2)))[:, None]
            inv_freq = 1.0 / bases**self._exponents
        return self._computed(positions, inv_freq)

    def _computed(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inv_freq
        halves = angles.cos(), angles.sin()
        cos, sin = (torch.cat([x, x], dim=-1)[:, None] * self.factor for x in halves)
        return cos.to(self._dtype), sin.to(self._dtype)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim


def inverse_frequencies(rope: RopeSpec, dim: int) -> Tensor:
    """float32 [D/2]; under dynamic NTK, those up to the original context."""
    rotated = int(dim * rope.parameters.get("partial_rotary_factor", 1.0))
    inv_freq = 1.0 / rope.theta ** _exponents(rotated)
    if rotated < dim:  # the other pairs are not rotated
        return torch.cat([inv_freq, inv_freq.new_zeros((dim - rotated) // 2)])
    if rope.kind == "linear":
        return inv_freq / rope.parameters["factor"]
    if rope.kind == "llama3":
        return _llama3(inv_freq, rope)
    if rope.kind == "yarn":
        return _yarn(inv_freq, rope, dim)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RopeSpec) -> Tensor:
    """Slow frequencies are divided by ``factor``, fast ones kept, those between interpolated."""
    p = rope.parameters
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    smooth = ((rope.original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / p["factor"] + smooth * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeSpec, dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071), 3.2: a ramp over dimensions from kept to interpolated."""
    p = rope.parameters

    def dimension(rotations: float) -> float:
        """The dimension that makes ``rotations`` turns within the original context."""
        turns = rope.original / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, device="cpu").float() - low) / (high - low)).clamp(
        0.0, 1.0
    )
    return inv_freq / p["factor"] * interpolated + inv_freq * (1 - interpolated)


def attention_factor(rope: RopeSpec) -> float:
    """What cosines and sines are multiplied by (YaRN, 3.4; ``mscale`` is DeepSeek's variant)."""
    if rope.kind != "yarn":
        return 1.0
    p = rope.parameters
    if "attention_factor" in p:
        return p["attention_factor"]
    growth = 0.1 * math.log(max(p["factor"], 1.0))
    if p.get("mscale") and p.get("mscale_all_dim"):
        return (p["mscale"] * growth + 1.0) / (p["mscale_all_dim"] * growth + 1.0)
    return growth + 1.0
