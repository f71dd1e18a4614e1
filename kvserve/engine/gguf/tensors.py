"""A GGUF file's tensors with the names, rows and numbers that transformers' checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from torch import Tensor

from kvserve.engine.gguf.config import WITH_STATES, family_of, tensor_names
from kvserve.engine.gguf.reader import StoredTensor, numbers, read_gguf
from kvserve.late import Late

if TYPE_CHECKING:
    from kvserve.engine.gguf.layout import DeltaHeads, Places

_heads_of = Late("engine.gguf.layout:DeltaHeads.of")
_PIECE = 2**18
"""Weights dequantised at once: that takes copies a few times as large."""
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")
_OF_RULE = ".linear_attn."


@dataclass(frozen=True)
class _WhenRead:
    """What transformers asks of a slice of safetensors."""

    tensors: GgufTensors
    name: str

    def __getitem__(self, _: Any) -> Tensor:
        return self.tensors.tensor(self.name)


class GgufTensors:
    """A ``Checkpoint`` in one file: float32, or the blocks that are stored.

    A weight may be some rows of a tensor, in an order of its own: an expert of all, heads that
    llama.cpp's converter turned or tiled.
    """

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
        self._heads: DeltaHeads | None = None
        if self._family in WITH_STATES:
            self._heads = _heads_of(self._file, self._family)
        self._from_one = self._family.startswith("gemma") or self._heads is not None

    @cached_property
    def names(self) -> set[str]:
        return set(self._stored)

    def file(self, name: str) -> Path:
        return self.path

    def shape(self, name: str) -> tuple[int, ...]:
        shape, part = self._tensor(name).shape, self._part(name)
        if self._heads is not None and part:
            return self._heads.shape(part, self._stored_part(name), shape)
        if _EXPERT.match(name):
            return shape[1:]
        if name.endswith(".conv.conv.weight"):
            return shape[0], 1, *shape[1:]
        return (1, *shape) if name.endswith("shared_expert_gate.weight") else shape

    def kind(self, name: str) -> str:
        """GGUF's name of the type that a tensor is stored in."""
        return self._tensor(name).kind.name

    def tensor(self, name: str) -> Tensor:
        whole = tuple(slice(0, size) for size in self.shape(name))
        return torch.cat([values.clone() for _, values in self.pieces(name, _PIECE, whole)])

    def slices(self, opened: ExitStack) -> dict[str, Any]:
        """As ``SafetensorsFiles`` has it."""
        return {name: _WhenRead(self, name) for name in self.names}

    def pieces(
        self, name: str, rows: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[slice, Tensor]]:
        """As ``Checkpoint`` has it; whole rows are dequantised for a region's columns."""
        shape, first = self.shape(name), region[0]
        if len(shape) == 1:
            yield first, self._vector(name)[first]
            return
        step = max(1, min(rows, _PIECE // prod(shape[1:])))
        for start in range(first.start, first.stop, step):
            part = slice(start, min(start + step, first.stop))
            values = self._numbers(name, part).view(-1, *shape[1:])
            yield part, values[(slice(None), *region[1:])]

    def blocks(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        """Rows as they are stored, uint8 [rows, bytes of a row]."""
        found, columns = self._blocks(name, rows), self._columns(name)
        if columns is None:
            return found
        each, size = GGML_QUANT_SIZES[self._tensor(name).kind]
        starts = columns.reshape(-1, each)[:, 0]
        if (columns.reshape(-1, each) != starts[:, None] + np.arange(each)).any():
            stored = self._stored[name]
            raise self._file.error(f"has {stored} in blocks of {each}, which its heads do not fill")
        return found.reshape(len(found), -1, size)[:, starts // each].reshape(len(found), -1)

    def _vector(self, name: str) -> Tensor:
        """Numbers of a norm, of a bias, or of the rule's heads."""
        values = self._numbers(name, slice(0, 1))[0]
        if name.endswith(".A_log"):
            return (-values).log()
        # transformers adds 1 to these weights; in llama.cpp's files it is in them.
        from_one = self._from_one and name.endswith("norm.weight") and not self._part(name)
        return values - 1.0 if from_one else values

    def _numbers(self, name: str, rows: slice) -> Tensor:
        values = torch.from_numpy(numbers(self._blocks(name, rows), self._tensor(name).kind))
        columns = self._columns(name)
        return values if columns is None else values[:, torch.from_numpy(columns)]

    def _blocks(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        """As ``blocks``, but columns are in the file's order."""
        order = self._rows(name)
        return self._file.blocks(self._stored[name], rows if order is None else order[rows])

    def _rows(self, name: str) -> Places | None:
        """Which of the tensor's rows are the weight's, in its order; ``None`` for all."""
        part, stored = self._part(name), self._stored_part(name)
        if (expert := _EXPERT.match(name)) is not None:
            size = self._tensor(name).shape[1]
            return np.arange(size) + int(expert[1]) * size
        if self._heads is not None and part:
            return self._heads.rows(part, stored)
        heads = self._turned.get(stored)
        if heads is None:
            return None
        # The file has the halves of each head in turns.
        numbered = np.arange(self.shape(name)[0]).reshape(heads, -1, 2)
        return numbered.swapaxes(1, 2).flatten()

    def _columns(self, name: str) -> Places | None:
        """As ``_rows``, along inputs."""
        return self._heads.columns(self._part(name)) if self._heads is not None else None

    def _part(self, name: str) -> str:
        """What a weight of a layer with the rule is called there; nothing for others."""
        return name.partition(_OF_RULE)[2]

    def _stored_part(self, name: str) -> str:
        parts = self._stored[name].split(".")
        return parts[2 if parts[0] == "blk" else 0]

    def _tensor(self, name: str) -> StoredTensor:
        return self._file.tensors[self._stored[name]]
