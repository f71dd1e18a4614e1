"""How entries are stored in the pool's blocks: one interface, one implementation per form.

A block is one range of bytes in every form, so tables, swaps, the prefix cache and the query log do
not depend on it. Writing, attention's reads, events' reads and moves do: they are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.engine.attention.base import Entries
from kvserve.entry_format import EntryFormat
from kvserve.kernels.storage import StorageKernels
from kvserve.scheduler.layout import KVLayout

if TYPE_CHECKING:
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

    def write(self, place: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the new entries of the layer at ``place`` in its blocks.

        slots: int64 [R, T]; k, v: [T, Hkv, D].
        """
        self._kernels.store_kv(self.memory, place, slots, k, v)

    def layer(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as attention reads them, ``[num_blocks, B, Hkv/R, D]``."""
        return self.memory[:, place, 0], self.memory[:, place, 1]

    def keys(self, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
        """Numbers of the keys in slots int64 [L', Hkv, S] of layers [L'] (``None``: all of them).

        Returns [L', Hkv, S, D].
        """
        return self._kernels.gather_kv(self.memory, slots, layer_ids)

    def values(self, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
        """As ``keys``, of values."""
        return self._kernels.gather_kv(self.memory, slots, layer_ids, True)

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

    def write(self, place: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        self._kernels.store_levels(self.blocks, place, slots, k, v)

    def layer(self, place: int) -> tuple[Entries, Entries]:
        return self.blocks.layer(place)

    def keys(self, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
        return self._kernels.gather_levels(self.blocks, slots, layer_ids, self._dtype)

    def values(self, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
        return self._kernels.gather_levels(self.blocks, slots, layer_ids, self._dtype, True)

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        self._kernels.move_levels(self.blocks, src, dst, runs)


EntryStore = RawEntries | QuantizedEntries


def block_bytes(layout: KVLayout, form: EntryFormat) -> int:
    """Bytes of one block, keys and values of all its layers and heads."""
    lanes = layout.layers_per_block * layout.heads_per_block
    return lanes * form.lane_bytes(layout.block_size, layout.head_dim)


def memory_shape(layout: KVLayout, form: EntryFormat, num_blocks: int) -> tuple[int, ...]:
    """Shape of ``num_blocks`` blocks: of bytes if entries are quantised, else of numbers."""
    if not form.quantized:
        return layout.cache_shape(num_blocks)
    layers = layout.layers_per_block
    return num_blocks, layers, block_bytes(layout, form) // layers
