"""How a checkpoint stores a weight, and how it is read in pieces that fit a small buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.log import ConfigError

_PIECE_BYTES = 32 * 2**20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Region = tuple[slice, ...]
"""A part of a weight: a slice along each of its dimensions."""
Piece = tuple[Region, Tensor]
"""A part of a weight (dimensions left out at the end are the wanted region's), and its values."""


class Storage(ABC):
    """One way to store a weight: by default in one tensor of its name and shape."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that hold the weight ``name``."""
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return checkpoint.shape(name)

    @abstractmethod
    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        """The weight's ``region``, and no other part of it, in pieces."""


class Plain(Storage):
    """One tensor of floats."""

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


class Transposed(Storage):
    """Numbers [experts, in, out] of a weight [experts, out, in], as gpt-oss has them."""

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        experts, inputs, outputs = checkpoint.shape(name)
        return experts, outputs, inputs

    def pieces(self, checkpoint: Checkpoint, name: str, region: Region) -> Iterator[Piece]:
        experts, outputs, inputs = region
        for part, values in checkpoint.pieces(name, 1, (experts, inputs, outputs)):
            yield (part,), values.transpose(1, 2)


def rows_per_piece(row_shape: tuple[int, ...]) -> int:
    """How many rows of such a shape fit the buffer as float32."""
    return max(1, _PIECE_BYTES // (4 * prod(row_shape)))


def check_finite(values: Tensor, weight: str, file: Path) -> None:
    """``ConfigError`` if some of a weight's numbers are none."""
    if not all(bound.isfinite() for bound in values.float().aminmax()):
        raise ConfigError(
            f"--model: {weight} in {file} holds NaN or infinite values as "
            f"{str(values.dtype)[6:]}; fetch it again, or choose another --dtype"
        )
