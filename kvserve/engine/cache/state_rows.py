"""States of rows on the device, a row at the place of its number: of each layer one array of a
convolution's tails, and one of recurrent states.

Decoding rows are the first ones, so that a step's layer reads and writes a view of its array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup, Shapes
from kvserve.engine.models.recurrent import LayerStates
from kvserve.engine.models.transformer import Transformer
from kvserve.scheduler.blocks.state_group import StateSpec


class StateRows(RowGroup):
    """``layers`` are views ``[max_rows, ...]``. Those of one shape lie one after the other, so that
    rows begin and move in all layers at once."""

    spec_type = StateSpec
    spec: StateSpec

    def __init__(self, spec: StateSpec, shapes: Shapes, device: str) -> None:
        assert not shapes, "states have no tables"
        self.spec, self.tables, self._device = spec, [], device
        self._arrays: list[Tensor] = []
        self.layers: dict[int, LayerStates] = {}

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        """Make the arrays, for the layers that run over ``cache``. A row begins with zeros."""
        tails = self._make([each.tail for each in self.spec.layers], cache.dtype)
        recurrent = self._make([each.recurrent for each in self.spec.layers], torch.float32)
        for each, tail, state in zip(self.spec.layers, tails, recurrent, strict=True):
            assert tail is not None
            self.layers[each.layer] = LayerStates(tail, state)
        of_caches: Any = model.states
        of_caches[cache] = self.layers

    def begin(self, rows: Tensor) -> None:
        for array in self._arrays:
            array[:, rows] = 0

    def move(self, to: Tensor, source: Tensor) -> None:
        for array in self._arrays:
            array[:, to] = array[:, source]

    def _make(
        self, shapes: Sequence[tuple[int, ...] | None], dtype: torch.dtype
    ) -> list[Tensor | None]:
        """Rows of each layer's shape; ``None`` where it has none."""
        # On a CPU, rows that no sequence has had cost no memory.
        made = torch.zeros if self._device == "cuda" else torch.empty
        found: list[Tensor | None] = [None] * len(shapes)
        for shape in {shape for shape in shapes if shape is not None}:
            layers = [layer for layer, its in enumerate(shapes) if its == shape]
            size = len(layers), self.spec.max_rows, *shape
            array = made(size, dtype=dtype, device=self._device)
            self._arrays.append(array)
            for place, layer in enumerate(layers):
                found[layer] = array[place]
        return found


KINDS.append(StateRows)
