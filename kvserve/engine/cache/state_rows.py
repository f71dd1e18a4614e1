"""States of rows on the device, a row at the place of its number: of each layer one array of a
convolution's tails, and one of recurrent states. Behind the rows lie those that later prompts may
begin with.

Decoding rows are the first ones, so that a step's layer reads and writes a view of its array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup, Shapes
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.states import LayerStates
from kvserve.engine.models.transformer import Transformer
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.kept_states import StateMove
from kvserve.scheduler.blocks.state_group import StateSpec
from kvserve.scheduler.messages.output import RowMove
from kvserve.scheduler.messages.saved_row import NO_PLACE


class StateRows(RowGroup):
    """``layers`` are views ``[max_rows + num_kept, ...]``. Those of one shape lie one after the
    other, so that rows begin and move in all layers at once."""

    spec_type = StateSpec
    spec: StateSpec

    def __init__(self, spec: StateSpec, shapes: Shapes, device: str) -> None:
        assert not shapes, "states have no tables"
        self.spec, self.tables, self._device = spec, [], device
        self._arrays: list[Tensor] = []
        self.layers: dict[int, LayerStates] = {}
        self._away: dict[int, IntArray] = {}
        """The host blocks of rows that are there, by their places."""

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        """Make the arrays, for the layers that run over ``cache``. A row begins with zeros."""
        # In this order numbers of four bytes are at multiples of four bytes of a row that is away.
        recurrent = self._make([each.recurrent for each in self.spec.layers], torch.float32)
        tails = self._make([each.tail for each in self.spec.layers], cache.dtype)
        for each, tail, state in zip(self.spec.layers, tails, recurrent, strict=True):
            assert tail is not None
            self.layers[each.layer] = LayerStates(tail, state)
        of_caches: Any = model.states
        of_caches[cache] = self.layers
        self._host = cache.host.flatten(1).view(torch.uint8)

    def begin(self, rows: Tensor) -> None:
        for array in self._arrays:
            array.index_fill_(1, rows, 0)

    def move(self, to: Tensor, source: Tensor) -> None:
        for array in self._arrays:
            array[:, to] = array[:, source]

    def swap(self, moves: Iterable[RowMove], *, back: bool) -> None:
        """Copy kept states to their places, all at once, or ``back``; and rows that leave for host
        memory, or come back, to the blocks that they have for it."""
        pairs = list[tuple[int, int]]()
        for move in moves:
            if isinstance(move, StateMove):
                pairs.append((move.row, move.state))
            elif move.place != NO_PLACE and back:
                self._read(move.row, self._away.pop(move.place))
            elif move.place != NO_PLACE:
                at = self._away[move.place] = move.host_blocks[move.device_blocks == 0]
                self._write(move.row, at)
        if pairs:
            rows, places = to_device(np.array(pairs).T, self._device)
            self.move(rows, places) if back else self.move(places, rows)

    def _write(self, row: int, at: IntArray) -> None:
        """Write all layers' states of ``row`` to host blocks, one after the other."""
        parts = [array[:, row].contiguous().view(torch.uint8).flatten() for array in self._arrays]
        whole = torch.zeros(len(at) * self._host.shape[1], dtype=torch.uint8)
        whole[: self.spec.row_bytes] = torch.cat(parts).cpu()
        self._host[torch.as_tensor(at)] = whole.view(len(at), -1)

    def _read(self, row: int, at: IntArray) -> None:
        """What ``_write`` has written."""
        whole, end = self._host[torch.as_tensor(at)].flatten(), 0
        for array in self._arrays:
            first, end = end, end + array[:, row].nbytes
            part = whole[first:end].view(array.dtype).view(array[:, row].shape)
            array[:, row] = part.to(array.device)

    def _make(
        self, shapes: Sequence[tuple[int, ...] | None], dtype: torch.dtype
    ) -> list[Tensor | None]:
        """Rows of each layer's shape; ``None`` where it has none."""
        # On a CPU, rows that no sequence has had cost no memory.
        made = torch.zeros if self._device == "cuda" else torch.empty
        found: list[Tensor | None] = [None] * len(shapes)
        for shape in {shape for shape in shapes if shape is not None}:
            layers = [layer for layer, its in enumerate(shapes) if its == shape]
            size = len(layers), self.spec.max_rows + self.spec.num_kept, *shape
            array = made(size, dtype=dtype, device=self._device)
            self._arrays.append(array)
            for place, layer in enumerate(layers):
                found[layer] = array[place]
        return found


KINDS.append(StateRows)
