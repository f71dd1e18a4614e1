"""Weights in FP4 (E2M1), two in a byte, with a scale for each few of them; they are widened."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.plain_storage import Piece, Region, Storage
from kvserve.engine.models.storage import first_number, level_rows
from kvserve.log import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent of MXFP4's scales
_SHARE = 32  # numbers that share one of them


def _numbers(pairs: Tensor) -> Tensor:
    """uint8 [.., n] -> float32 [.., 2n]; the first of a pair is in the lower half."""
    levels = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
    return levels[torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).int()]


@dataclass(frozen=True)
class Mxfp4(Storage):
    """gpt-oss's experts: E2M1 numbers, two in a byte, and a power of two for each 32 of them:
    ``_blocks [experts, out, in / 32, 16]``, the first of a pair in the lower half, and ``_scales
    [experts, out, in / 32]``, exponents of e8m0 (OCP Microscaling Formats, version 1.0, 5.2 and 6).
    """

    def parts(self, name: str) -> tuple[str, ...]:
        return (f"{name}_blocks", f"{name}_scales")

    def fits(self, checkpoint: Checkpoint, name: str) -> bool:
        return True

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        experts, outputs, groups, pairs = checkpoint.shape(f"{name}_blocks")
        return experts, outputs, groups * pairs * 2

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        blocks, scales = self.parts(name)
        shape = checkpoint.shape(blocks)
        if shape[3] != _SHARE // 2 or checkpoint.shape(scales) != shape[:3]:
            raise ConfigError(
                f"--model: {blocks} and {scales} in {checkpoint.file(blocks)} have shapes {shape} "
                f"and {checkpoint.shape(scales)}; MXFP4 has a scale for each {_SHARE} numbers"
            )
        everything = tuple(slice(0, size) for size in shape[1:])
        for part, values in checkpoint.pieces(blocks, 1, (region[0], *everything)):
            (_, exponents), *_ = checkpoint.pieces(scales, 1, (part, *everything[:2]))
            numbers = torch.ldexp(_numbers(values), (exponents.int() - _BIAS)[..., None])
            yield (part, *region[1:]), numbers.flatten(-2)[(slice(None), *region[1:])]


@dataclass(frozen=True)
class Fp4(Storage):
    """A matrix: pairs [out, in / 2], and for each ``group`` inputs a scale [out, in / group], in
    tensors whose names end so. NVFP4's are e4m3, and the weight has a scale of its own, by which
    they are multiplied, or divided (``divides``); MXFP4's are exponents."""

    group: int
    pairs_at: str
    whole_at: str = ""
    divides: bool = False

    def parts(self, name: str) -> tuple[str, ...]:
        ends = self.pairs_at, "weight_scale", self.whole_at
        return tuple(name.removesuffix("weight") + end for end in ends if end)

    def fits(self, checkpoint: Checkpoint, name: str) -> bool:
        dtypes = [first_number(checkpoint, part).dtype for part in self.parts(name)[:2]]
        return dtypes == [torch.uint8, torch.float8_e4m3fn if self.whole_at else torch.uint8]

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        outputs, pairs = checkpoint.shape(self.parts(name)[0])
        return outputs, 2 * pairs

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        pairs, scales, *whole = self.parts(name)
        outputs, inputs = self.shape(checkpoint, name)
        shape = outputs, inputs // self.group
        if checkpoint.shape(scales) != shape or not self.fits(checkpoint, name):
            raise ConfigError(
                f"--model: {pairs} and {scales} in {checkpoint.file(pairs)} have shapes "
                f"{checkpoint.shape(pairs)} and {checkpoint.shape(scales)}; FP4 has a byte for two "
                f"numbers and a scale of 8 bits for each {self.group}"
            )
        of_all = checkpoint.tensor(whole[0]).float().view(1) if whole else torch.ones(1)
        factor = 1 / of_all if self.divides else of_all
        columns, all_scales = region[1], slice(0, shape[1])
        read = slice(columns.start // 2, -(-columns.stop // 2))
        groups = torch.arange(columns.start, columns.stop) // self.group
        for rows in level_rows(region[0], columns.stop - columns.start):
            ((_, values),) = checkpoint.pieces(pairs, rows.stop - rows.start, (rows, read))
            ((_, own),) = checkpoint.pieces(scales, rows.stop - rows.start, (rows, all_scales))
            by_group = own.float() * factor if whole else torch.exp2(own.float() - _BIAS)
            first = columns.start - 2 * read.start
            numbers = _numbers(values)[:, first : first + len(groups)]
            yield (rows, columns), numbers * by_group[:, groups]
