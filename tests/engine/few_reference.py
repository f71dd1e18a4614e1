"""Entries in few bits as their rule says, vector by vector and channel by channel, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.entry_format import VectorForm
from kvserve.kernels.store.entries import Shaping
from kvserve.kernels.store.few_bits import FewVectors
from kvserve.kernels.store.few_levels import unpacked


def hadamard(dim: int) -> Tensor:
    """Sylvester's matrix over the root of its size; of other dims, one for each power of two."""
    parts, left = [], dim
    while left:
        size = 1 << (left.bit_length() - 1)
        part = torch.ones(1, 1, dtype=torch.float64)
        while len(part) < size:
            part = torch.cat([torch.cat([part, part], 1), torch.cat([part, -part], 1)])
        parts.append(part / math.sqrt(size))
        left -= size
    return torch.block_diag(*parts)


def rounded(
    x: Tensor, bits: int, factor: float, feedback: Tensor | None, order: Tensor | None
) -> tuple[list[int], int]:
    """The levels and the code of one turned vector [D]."""
    mean = float((x * x).mean())
    code = 0 if mean == 0 else min(max(round(8 * math.log2(mean)) + 128, 0), 255)
    step, half = factor * 2 ** ((code - 128) / 16), 2 ** (bits - 1)

    def level(t: float) -> int:
        return min(max(math.floor(t / step) + half, 0), 2 * half - 1)

    if feedback is None or order is None:
        return [level(float(t)) for t in x], code
    levels, errors = [0] * len(x), torch.zeros_like(x)
    for i in reversed(range(len(x))):
        channel = int(order[i])
        t = float(x[channel] - (feedback[i + 1 :, i].double() * errors[i + 1 :]).sum())
        levels[channel] = level(t)
        errors[i] = (levels[channel] - half + 0.5) * step - x[channel]
    return levels, code


@dataclass(frozen=True)
class Stored:
    """Keys or values of one layer as they are stored: ``levels [Hkv, T, D]`` and ``codes``."""

    form: VectorForm
    levels: Tensor
    codes: Tensor
    factor: float
    shaping: Shaping | None
    """Of keys."""

    @classmethod
    def of(cls, held: Tensor, vectors: FewVectors, shaping: Shaping) -> Stored:
        """From bytes [Hkv, T, bytes + 1]."""
        levels = unpacked(held[..., :-1], vectors.form.bits, vectors.dim)
        own = shaping if vectors.of_keys else None
        return cls(vectors.form, levels, held[..., -1], vectors.factor, own)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.levels, self.codes[..., None]

    def widened(self) -> Tensor:
        """The numbers, float64, turned back: [Hkv, T, D]."""
        step = self.factor * 2 ** ((self.codes.double() - 128) / 16)
        half = 2 ** (self.form.bits - 1) - 0.5
        numbers = (self.levels.double() - half) * step[..., None] @ hadamard(self.levels.shape[-1])
        return numbers if self.shaping is None else numbers + self.shaping.mean[:, None].double()

    def again(self, x: Tensor) -> Stored:
        """As numbers [Hkv, T, D] have to be stored."""
        shaping, x = self.shaping, x.double()
        if shaping is not None:
            x = x - shaping.mean[:, None].double()
        x = x @ hadamard(x.shape[-1])
        levels, codes = torch.empty_like(self.levels), torch.empty_like(self.codes)
        for head in range(len(x)):
            how: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
            if shaping is not None and shaping.feedback is not None and shaping.order is not None:
                how = shaping.feedback[head], shaping.order[head]
            for token in range(x.shape[1]):
                found, code = rounded(x[head, token], self.form.bits, self.factor, *how)
                levels[head, token], codes[head, token] = torch.tensor(found), code
        return Stored(self.form, levels, codes, self.factor, shaping)
