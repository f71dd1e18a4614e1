"""Weights that a checkpoint stores as levels and scales, or in another form than numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Blocks, Checkpoint
from kvserve.engine.models.plain_storage import Piece, Region, Storage, rows_per_piece
from kvserve.kernels.layer.weight_levels import LevelForm, widened

_BLOCK = 32
GGUF_FORMS = {
    "Q4_0": LevelForm(4, _BLOCK, lowest=-8),
    "Q4_1": LevelForm(4, _BLOCK, offsets="minimum"),
    "Q8_0": LevelForm(8, _BLOCK),
}
"""What of GGUF's types is held as it is stored, by its name there."""


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


def first_number(checkpoint: Checkpoint, name: str) -> Tensor:
    """One number of a tensor, for its type."""
    one = tuple(slice(0, 1) for _ in checkpoint.shape(name))
    return checkpoint.tensor(name) if not one else next(checkpoint.pieces(name, 1, one))[1]


def level_rows(rows: slice, width: int) -> Iterator[slice]:
    """Parts of ``rows`` that fit an eighth of the buffer, since unpacking takes several copies:
    whole eights, which may share a word."""
    size = max(8, rows_per_piece((8 * width,)) // 8 * 8)
    first = rows.start
    while first < rows.stop:
        last = min(first // 8 * 8 + size, rows.stop)
        yield slice(first, last)
        first = last
