"""How entries are stored in the pool's blocks: one interface, one implementation per form.

A block is one range of bytes in every form, so tables, swaps, the prefix cache and the query log do
not depend on it. Writing, attention's reads, events' reads and moves do: they are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.engine.attention.base import Entries
from kvserve.engine.device.transfer import to_device
from kvserve.entry_format import EntryFormat
from kvserve.kernels.storage import StorageKernels
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout

if TYPE_CHECKING:
    from kvserve.kernels.few_bits import FewBlocks
    from kvserve.kernels.quantized_entries import QuantizedBlocks


class RawEntries:
    """Numbers as they were computed: ``memory [num_blocks, L/LG, 2, B, Hkv/R, D]``.

    Its methods are those of all forms.
    """

    def __init__(self, memory: Tensor, kernels: StorageKernels) -> None:
        self.memory = memory
        self.store_rotated = kernels.store_rotated
        """Rotates keys and writes them in one launch; ``None``: they come rotated."""
        self._kernels = kernels

    def index(self, layer: int, place: int) -> int:
        """What ``write`` and ``layer`` call the model's ``layer``, at ``place`` in its blocks."""
        return place

    def write(self, place: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the new entries of the layer at ``place`` in its blocks.

        slots: int64 [R, T]; k, v: [T, Hkv, D].
        """
        self._kernels.store_kv(self.memory, place, slots, k, v)

    def layer(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as attention reads them, ``[num_blocks, B, Hkv/R, D]``."""
        return self.memory[:, place, 0], self.memory[:, place, 1]

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        """Numbers of the keys in slots int64 [L', Hkv, S] of layers [L'] (``None``: all of them),
        of those that see all tokens.

        Returns [L', Hkv, S, D].
        """
        return self._kernels.gather_kv(self.memory, slots, _on(slots, layers))

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        """As ``keys``, of values."""
        return self._kernels.gather_kv(self.memory, slots, _on(slots, layers), True)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        """Copy entries, bit for bit: int64 slots [L, Hkv, S], ``runs`` events of equal length."""
        self._kernels.move_kv(self.memory, src, dst, runs)


class QuantizedEntries:
    """Levels with a scale for each vector: ``memory`` uint8 [num_blocks, L/LG, bytes].

    A number is rounded once, when it is stored; events read numbers of ``dtype``.
    """

    store_rotated: Callable[..., Tensor] | None = None

    def __init__(
        self, blocks: QuantizedBlocks, kernels: StorageKernels, dtype: torch.dtype
    ) -> None:
        self.memory = blocks.pool
        self.blocks = blocks
        self._kernels = kernels
        self._dtype = dtype

    def index(self, layer: int, place: int) -> int:
        return place

    def write(self, place: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._kernels.store_levels(self.blocks, place, slots, k, v)

    def layer(self, place: int) -> tuple[Entries, Entries]:
        return self.blocks.layer(place)

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self._kernels.gather_levels(self.blocks, slots, _on(slots, layers), self._dtype)

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        own = _on(slots, layers)
        return self._kernels.gather_levels(self.blocks, slots, own, self._dtype, True)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        self._kernels.move_levels(self.blocks, src, dst, runs)


class FewEntries:
    """Entries in few bits (``kernels/few_bits.py``), by the number of the model's layer, not by its
    place: ``memory`` uint8 [num_blocks, bytes]. ``full`` are the layers that see all tokens."""

    store_rotated: Callable[..., Tensor] | None = None

    def __init__(
        self, blocks: FewBlocks, kernels: StorageKernels, dtype: torch.dtype, full: Sequence[int]
    ) -> None:
        self.memory = blocks.pool
        self.blocks = blocks
        self._kernels = kernels.few
        self._dtype = dtype
        self._full = list(full)
        means = [blocks.layers[layer].shaping.mean for layer in full]
        self.means = torch.stack(means) if means else blocks.layers[0].shaping.mean[:0]
        """Of the keys of these layers, float32 [L, Hkv, D]."""

    def index(self, layer: int, place: int) -> int:
        return layer

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._kernels.store(self.blocks, layer, slots, k, v)

    def layer(self, layer: int) -> tuple[Entries, Entries]:
        return self.blocks.layer(layer)

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self._kernels.gather(self.blocks, self._named(layers), slots, self._dtype)

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        return self._kernels.gather(self.blocks, self._named(layers), slots, self._dtype, True)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        self._kernels.move(self.blocks, self._full, src, dst, runs)

    def turn(self, x: Tensor, layer: int | None = None) -> Tensor:
        """Heads [T, H, D] as they are held: keys of a ``layer``, or else queries and values, which
        the same turns back."""
        mean = None if layer is None else self.blocks.layers[layer].shaping.mean
        return self._kernels.turn(x, mean)

    def _named(self, layers: IntArray | None) -> list[int]:
        return self._full if layers is None else [self._full[place] for place in layers]


def _on(slots: Tensor, layers: IntArray | None) -> Tensor | None:
    return None if layers is None else to_device(layers, slots.device)


EntryStore = RawEntries | QuantizedEntries | FewEntries


def block_bytes(layout: KVLayout, form: EntryFormat) -> int:
    """Bytes of one block, keys and values of all its layers and heads."""
    lanes = layout.layers_per_block, layout.heads_per_block
    return form.block_bytes(layout.block_size, layout.head_dim, *lanes)


def memory_shape(layout: KVLayout, form: EntryFormat, num_blocks: int) -> tuple[int, ...]:
    """Shape of ``num_blocks`` blocks: of bytes if entries are quantised, else of numbers."""
    if not form.quantized:
        return layout.cache_shape(num_blocks)
    layers = 1 if form.few else layout.layers_per_block
    return num_blocks, layers, block_bytes(layout, form) // layers
