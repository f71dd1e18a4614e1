"""A GGUF file's tensors with the names, rows and numbers that transformers' checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from kvserve.engine.gguf.config import family_of, tensor_names
from kvserve.engine.gguf.reader import numbers, read_gguf

_PIECE = 2**18
"""Weights dequantised at once: that takes copies a few times as large."""


class GgufTensors:
    """A ``Checkpoint`` in one file: float32, or the blocks that are stored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = read_gguf(path)
        self._stored = tensor_names(self._file)
        self._family = family_of(self._file)
        self._turned: dict[str, int] = {}
        """Heads of the matrices that llama.cpp's converter turns to rotate neighbours."""
        if self._family == "llama":
            heads = self._file.value("llama.attention.head_count", int)
            kv_heads = self._file.value("llama.attention.head_count_kv", int, heads)
            self._turned = {"attn_q": heads, "attn_k": kv_heads}

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def file(self, name: str) -> Path:
        return self.path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored[name]].shape

    def kind(self, name: str) -> str:
        """GGUF's name of the type that a tensor is stored in."""
        return self._kind(name).name

    def tensor(self, name: str) -> Tensor:
        whole = tuple(slice(0, size) for size in self.shape(name))
        return torch.cat([values.clone() for _, values in self.pieces(name, _PIECE, whole)])

    def pieces(
        self, name: str, rows: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[slice, Tensor]]:
        """As ``Checkpoint`` has it; whole rows are dequantised for a region's columns."""
        shape, first = self.shape(name), region[0]
        # transformers adds 1 to the weights of Gemma's norms; in llama.cpp's files it is in them.
        offset = 1.0 if self._family[:5] == "gemma" and name.endswith("norm.weight") else None
        if len(shape) == 1:
            values = self._numbers(name, slice(0, 1))[0, first]
            yield first, values if offset is None else values - offset
            return
        step = max(1, min(rows, _PIECE // prod(shape[1:])))
        for start in range(first.start, first.stop, step):
            part = slice(start, min(start + step, first.stop))
            values = self._numbers(name, part)
            yield part, values[(slice(None), *region[1:])]

    def blocks(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        """Rows as they are stored, uint8 [rows, bytes of a row]."""
        stored = self._stored[name]
        heads = self._turned.get(stored.split(".")[-2])
        order: slice | np.ndarray[Any, Any] = rows
        if heads is not None:  # the file has the halves of each head in turns
            numbered = np.arange(self.shape(name)[0]).reshape(heads, -1, 2)
            order = numbered.swapaxes(1, 2).flatten()[rows]
        return self._file.blocks(stored, order)

    def _numbers(self, name: str, rows: slice) -> Tensor:
        return torch.from_numpy(numbers(self.blocks(name, rows), self._kind(name)))

    def _kind(self, name: str) -> GGMLQuantizationType:
        return self._file.tensors[self._stored[name]].kind
