"""How a checkpoint stores a weight, and how it is read in pieces that fit a small buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.kernels.weight_levels import LevelForm, widened
from kvserve.log import ConfigError

_PIECE_BYTES = 32 * 2**20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)

Region = tuple[slice, ...]
"""A part of a weight: a slice along each of its dimensions."""
Piece = tuple[Region, Tensor]
"""A part of a weight (dimensions left out at the end are the wanted region's), and its values."""


class Storage(Protocol):
    """One way to store a weight."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that hold the weight ``name``."""
        ...

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]: ...

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        """The weight's ``region``, and no other part of it, in pieces."""
        ...


class Plain:
    """One tensor of floats."""

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return checkpoint.shape(name)

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        size = rows_per_piece(tuple(part.stop - part.start for part in region[1:]))
        for rows, values in checkpoint.pieces(name, size, region):
            if values.dtype not in _FLOATS:
                raise ConfigError(
                    f"--model: {name} in {checkpoint.file(name)} is {str(values.dtype)[6:]}, but "
                    "there is no scale for it or no quantization_config in config.json; fetch both "
                    "again"
                )
            yield (rows,), values


class LevelPiece(NamedTuple):
    """Rows of a weight: levels [R, columns] of the wanted columns, a byte each (of 4 bits, 0 to
    15); scales and offsets [R, G] of all its groups."""

    rows: slice
    levels: Tensor
    scales: Tensor
    offsets: Tensor | None


class StoredLevels(ABC):
    """A ``Storage`` of levels and scales, which can be held as they are."""

    @abstractmethod
    def parts(self, name: str) -> tuple[str, ...]: ...

    @abstractmethod
    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]: ...

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


def rows_per_piece(row_shape: tuple[int, ...]) -> int:
    """How many rows of such a shape fit the buffer as float32."""
    return max(1, _PIECE_BYTES // (4 * prod(row_shape)))


def level_rows(rows: slice, width: int) -> Iterator[slice]:
    """Parts of ``rows`` that fit an eighth of the buffer, since unpacking takes several copies:
    whole eights, which may share a word."""
    size = max(8, rows_per_piece((8 * width,)) // 8 * 8)
    first = rows.start
    while first < rows.stop:
        last = min(first // 8 * 8 + size, rows.stop)
        yield slice(first, last)
        first = last
