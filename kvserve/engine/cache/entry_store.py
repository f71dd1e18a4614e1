"""How entries are stored in the pool's blocks: one interface, one implementation per form.

A block is one range of bytes in every form, so tables, swaps, the prefix cache and the query log do
not depend on it. Writing, attention's reads, events' reads and moves do: they are here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.entry_format import EntryFormat
from kvserve.kernels.storage import StorageKernels, move_kv
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout

if TYPE_CHECKING:
    from kvserve.kernels.store.entries import Entries
    from kvserve.kernels.store.remainder import Remainder


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

        slots: int64 [R, T]; k, v: [T, Hkv, D]. What was read of a quantised form is rounded again.
        """
        self._kernels.store_kv(self.memory, place, slots, k, v)

    def layer(self, place: int) -> tuple[Entries, Entries]:
        """Keys and values of one layer as attention reads them, ``[num_blocks, B, Hkv/R, D]``."""
        return self.memory[:, place, 0], self.memory[:, place, 1]

    def keys(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        """Numbers of the keys in slots int64 [L', Hkv, S] of layers [L'] (``None``: all of them),
        of those that see all tokens.

        Returns [L', Hkv, S, D].
        """
        return self._kernels.gather_kv(self.memory, slots, on_device(slots, layers))

    def values(self, slots: Tensor, layers: IntArray | None) -> Tensor:
        """As ``keys``, of values."""
        return self._kernels.gather_kv(self.memory, slots, on_device(slots, layers), True)

    def mean(self, slots: Tensor, counts: Tensor) -> Remainder:
        """``mean_of`` the entries in slots [L, Hkv, E * S] of all layers."""
        mean: Remainder = move_kv.mean_kv(self.memory, slots, counts, self.keys, self.values)
        return mean

    def scored(self, slots: Tensor, layers: IntArray | None) -> Any:
        """As ``keys``, or as ``LevelKeys`` where scores take levels faster."""
        return self.keys(slots, layers)

    def turn(self, x: Tensor, layer: int | None = None) -> Tensor:
        """Heads [T, H, D] as they are held: keys of a ``layer``, or else queries and values, which
        the same turns back."""
        return x

    def turn_remainder(self, left: Remainder, layers: Tensor | None, *, back: bool) -> Remainder:
        """What stands for entries of ``layers [L']`` (``None``: all that see all tokens), [E, L',
        Hkv, ...], as entries are held, or ``back``."""
        return left

    def move(self, src: Tensor, dst: Tensor, runs: int) -> None:
        """Copy entries, bit for bit: int64 slots [L, Hkv, S], ``runs`` events of equal length."""
        self._kernels.move_kv(self.memory, src, dst, runs)


def on_device(slots: Tensor, layers: IntArray | None) -> Tensor | None:
    """Numbers of layers beside their ``slots``."""
    return None if layers is None else to_device(layers, slots.device)


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


def remainder_bytes(layout: KVLayout) -> int:
    """Bytes of one row's remainder: a key, a value and a weight for each lane."""
    return layout.num_layers * layout.num_kv_heads * 4 * (2 * layout.head_dim + 1)


def score_bytes(layout: KVLayout, count: int) -> int:
    """Bytes of ``count`` scores of one row that are kept for each lane from event to event."""
    return layout.num_layers * layout.num_kv_heads * 4 * count
