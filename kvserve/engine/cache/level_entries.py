"""Entries that are held as levels: of whole bytes with a scale each, or of few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.engine.cache.entry_store import RawEntries, on_device
from kvserve.kernels.move.move_levels import gather_key_levels_cpu, mean_levels
from kvserve.kernels.storage import COMPILED, StorageKernels
from kvserve.kernels.store.entries import Entries
from kvserve.kernels.store.quantized_entries import LevelKeys, QuantizedBlocks
from kvserve.kernels.store.remainder import Remainder
from kvserve.scheduler.arrays import IntArray

if TYPE_CHECKING:
    from kvserve.kernels.store.few_bits import FewBlocks


class QuantizedEntries(RawEntries):
    """Levels with a scale for each vector: ``memory`` uint8 [num_blocks, L/LG, bytes].

    A number is rounded when it is written, and not by moves; events read numbers of ``dtype``.
    """

    def __init__(
        self, blocks: QuantizedBlocks, kernels: StorageKernels, dtype: torch.dtype
    ) -> None:
        self.memory, self.store_rotated = blocks.pool, None
        self.blocks = blocks
        self._kernels = kernels
        self._dtype = dtype

    def write(self, place: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._kernels.store_levels(self.blocks, place, slots, k, v)

    def layer(self, place: int) -> tuple[Entries, Entries]:
        return self.blocks.layer(place)

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self._kernels.gather_levels(
            self.blocks, slots, on_device(slots, layers), self._dtype
        )

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        own = on_device(slots, layers)
        return self._kernels.gather_levels(self.blocks, slots, own, self._dtype, True)

    def mean(self, slots: Tensor, counts: Tensor) -> Remainder:
        return mean_levels(self.blocks, slots, counts, self._dtype, self.keys, self.values)

    def scored(self, slots: Tensor, layers: IntArray | None) -> Tensor | LevelKeys:
        form, own = self.blocks.keys.form, on_device(slots, layers)
        if self._kernels.gather_levels is not COMPILED.gather_levels or form.e4m3:
            return self.keys(slots, layers)
        return gather_key_levels_cpu(self.blocks, slots, own)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        self._kernels.move_levels(self.blocks, src, dst, runs)


class FewEntries(RawEntries):
    """Entries in few bits (``kernels/store/few_bits.py``), by the number of the model's layer, not
    by its place: ``memory`` uint8 [num_blocks, bytes]. ``full``: the layers that see all tokens."""

    def __init__(
        self, blocks: FewBlocks, kernels: StorageKernels, dtype: torch.dtype, full: Sequence[int]
    ) -> None:
        self.memory, self.store_rotated = blocks.pool, None
        self.blocks = blocks
        self.few = kernels.few
        self._dtype = dtype
        self._full = list(full)
        means = [blocks.layers[layer].shaping.mean for layer in full]
        self._means = torch.stack(means) if means else blocks.layers[0].shaping.mean[:0]
        """Of the keys of these layers, float32 [L, Hkv, D]."""

    def index(self, layer: int, place: int) -> int:
        return layer

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self.few.store(self.blocks, layer, slots, k, v)

    def layer(self, layer: int) -> tuple[Entries, Entries]:
        return self.blocks.layer(layer)

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self.few.gather(self.blocks, self._named(layers), slots, self._dtype)

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self.few.gather(self.blocks, self._named(layers), slots, self._dtype, True)

    def numbers(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all layers in slots [L, Hkv, S], unrounded: float32 [L, Hkv, S, D]."""
        read = self.blocks, self._full, slots, torch.float32
        return self.few.gather(*read), self.few.gather(*read, True)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        self.few.move(self.blocks, self._full, src, dst, runs)

    def turn(self, x: Tensor, layer: int | None = None) -> Tensor:
        mean = None if layer is None else self.blocks.layers[layer].shaping.mean
        return self.few.turn(x, mean)

    def turn_remainder(self, left: Remainder, layers: Tensor | None, *, back: bool) -> Remainder:
        means = self._means if layers is None else self._means[layers]
        turn, (keys, values) = self.few.turn_vectors, left.numbers()
        if back:
            return Remainder(turn(keys) + means, turn(values), left.bias)
        return Remainder(turn(keys, means), turn(values), left.bias)

    def _named(self, layers: IntArray | None) -> list[int]:
        return self._full if layers is None else [self._full[place] for place in layers]
