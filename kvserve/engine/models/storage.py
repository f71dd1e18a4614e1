"""Weights that a checkpoint stores as levels and scales, or in another form than numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Blocks, Checkpoint
from kvserve.engine.models.plain_storage import Piece, Region, Storage, rows_per_piece
from kvserve.kernels.weight_levels import LevelForm, widened
from kvserve.log import ConfigError

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent of MXFP4's scales
_SHARE = 32  # numbers that share one of them
_BLOCK = 32
GGUF_FORMS = {
    "Q4_0": LevelForm(4, _BLOCK, lowest=-8),
    "Q4_1": LevelForm(4, _BLOCK, offsets="minimum"),
    "Q8_0": LevelForm(8, _BLOCK),
}
"""What of GGUF's types is held as it is stored, by its name there."""


@dataclass(frozen=True)
class Mxfp4(Storage):
    """gpt-oss's experts: E2M1 numbers, two in a byte, and a power of two for each 32 of them:
    ``_blocks [experts, out, in / 32, 16]``, the first of a pair in the lower half, and ``_scales
    [experts, out, in / 32]``, exponents of e8m0 (OCP Microscaling Formats, version 1.0, 5.2 and 6).
    """

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
        if shape[3] != _SHARE // 2 or checkpoint.shape(scales) != shape[:3]:
            raise ConfigError(
                f"--model: {blocks} and {scales} in {checkpoint.file(blocks)} have shapes {shape} "
                f"and {checkpoint.shape(scales)}; MXFP4 has a scale for each {_SHARE} numbers"
            )
        everything = tuple(slice(0, size) for size in shape[1:])
        levels = torch.tensor([*_E2M1, *(-x for x in _E2M1)])
        for part, values in checkpoint.pieces(blocks, 1, (region[0], *everything)):
            (_, exponents), *_ = checkpoint.pieces(scales, 1, (part, *everything[:2]))
            pairs = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
            numbers = torch.ldexp(levels[pairs.int()], (exponents.int() - _BIAS)[..., None])
            yield (part, *region[1:]), numbers.flatten(-2)[(slice(None), *region[1:])]


class LevelPiece(NamedTuple):
    """Rows of a weight: levels [R, columns] of the wanted columns, a byte each (of 4 bits, 0 to
    15); scales and offsets [R, G] of all its groups."""

    rows: slice
    levels: Tensor
    scales: Tensor
    offsets: Tensor | None


class StoredLevels(Storage):
    """Levels and scales, which can be held as they are."""

    @abstractmethod
    def form(self, checkpoint: Checkpoint, name: str) -> LevelForm:
        """The weight's, with groups as in the checkpoint."""

    def groups(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """int64 [inputs]: the group of each input."""
        group = self.form(checkpoint, name).group
        return torch.arange(self.shape(checkpoint, name)[1]) // group

    @abstractmethod
    def levels(
        self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice
    ) -> Iterator[LevelPiece]:
        """A part of the weight, and no other, in pieces."""

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        form = self.form(checkpoint, name)
        groups = self.groups(checkpoint, name)[region[1]]
        for rows, levels, scales, offsets in self.levels(checkpoint, name, *region):
            yield (rows, region[1]), widened(form, levels, scales, offsets, groups)


class GgufLevels(StoredLevels):
    """GGUF's types that are held: a block of 32 weights has its scale, in Q4_1 its minimum, and its
    levels: of 4 bits, number j is below number j + 16 in a byte
    (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def form(self, checkpoint: Checkpoint, name: str) -> LevelForm:
        return GGUF_FORMS[self._blocks.kind(name)]

    def levels(
        self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice
    ) -> Iterator[LevelPiece]:
        form = self.form(checkpoint, name)
        numbers = 2 if form.offsets else 1
        for part in level_rows(rows, self.shape(checkpoint, name)[1]):
            stored = torch.from_numpy(self._blocks.blocks(name, part))
            blocks = stored.unflatten(1, (-1, 2 * numbers + 4 * form.bits))
            head, levels = blocks.split([2 * numbers, 4 * form.bits], dim=-1)
            scales: Tensor = head.contiguous().view(torch.float16)
            if form.bits == 4:
                levels = torch.cat([levels & 15, levels >> 4], dim=-1)
            levels = levels.flatten(1)[:, columns]
            offsets = scales[..., 1] if form.offsets else None
            yield LevelPiece(part, levels.contiguous(), scales[..., 0], offsets)


def level_rows(rows: slice, width: int) -> Iterator[slice]:
    """Parts of ``rows`` that fit an eighth of the buffer, since unpacking takes several copies:
    whole eights, which may share a word."""
    size = max(8, rows_per_piece((8 * width,)) // 8 * 8)
    first = rows.start
    while first < rows.stop:
        last = min(first // 8 * 8 + size, rows.stop)
        yield slice(first, last)
        first = last
