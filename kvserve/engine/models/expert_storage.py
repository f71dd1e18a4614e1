"""How gpt-oss stores its experts: one tensor for all of them, as numbers or in MXFP4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.storage import Piece, Region
from kvserve.log import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of a scale's exponent
GROUP = 32
"""Numbers of an input row that share a scale."""


class Transposed:
    """Numbers [experts, in, out] of a weight [experts, out, in]."""

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        experts, inputs, outputs = checkpoint.shape(name)
        return experts, outputs, inputs

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        experts, outputs, inputs = region
        for part, values in checkpoint.pieces(name, 1, (experts, inputs, outputs)):
            yield (part,), values.transpose(1, 2)


@dataclass(frozen=True)
class Mxfp4:
    """E2M1 numbers, two in a byte, and a power of two for each 32 of them: ``_blocks [experts, out,
    in / 32, 16]``, the first of a pair in the lower half, and ``_scales [experts, out, in / 32]``,
    exponents of e8m0 (OCP Microscaling Formats, version 1.0, 5.2 and 6)."""

    method: str = "mxfp4"
    activations: bool = False
    kv_cache: bool = False

    def parts(self, name: str) -> tuple[str, ...]:
        return (f"{name}_blocks", f"{name}_scales")

    def is_unused(self, name: str) -> bool:
        return False

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        experts, outputs, groups, pairs = checkpoint.shape(f"{name}_blocks")
        return experts, outputs, groups * pairs * 2

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        blocks, scales = self.parts(name)
        shape = checkpoint.shape(blocks)
        if shape[3] != GROUP // 2 or checkpoint.shape(scales) != shape[:3]:
            raise ConfigError(
                f"--model: {blocks} and {scales} in {checkpoint.file(blocks)} have shapes {shape} "
                f"and {checkpoint.shape(scales)}; MXFP4 has a scale for each {GROUP} numbers"
            )
        everything = tuple(slice(0, size) for size in shape[1:])
        for part, values in checkpoint.pieces(blocks, 1, (region[0], *everything)):
            (_, exponents), *_ = checkpoint.pieces(scales, 1, (part, *everything[:2]))
            yield (part, *region[1:]), dequantized(values, exponents)[(slice(None), *region[1:])]


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 blocks [..., groups, 16] and scales [..., groups] -> float32 [..., groups * 32]."""
    values = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(values[pairs.int()], (scales.int() - _BIAS)[..., None])
    return numbers.flatten(-2)
