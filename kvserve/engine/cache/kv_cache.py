"""The cache's one tensor, viewed as blocks of entries and as blocks of logged queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch, RotateAndStore
from kvserve.engine.cache.entry_store import RawEntries, memory_shape
from kvserve.engine.cache.log_form import LogForm
from kvserve.engine.device.pages import use_large_pages
from kvserve.engine.device.transfer import to_device
from kvserve.entry_format import EntryFormat, entry_format
from kvserve.kernels.storage import StorageKernels, by_device
from kvserve.late import Late
from kvserve.scheduler.layout import KVLayout, LayerKinds
from kvserve.scheduler.messages.output import RowMove, RowMoves

if TYPE_CHECKING:
    from kvserve.engine.cache.query_log import QueryLog
    from kvserve.kernels.store.entries import AnyLevels, Entries, FewLayer

_query_log = Late("engine.cache.query_log:QueryLog")
_quantized_blocks = Late("kernels.store.quantized_entries:QuantizedBlocks")
_quantized_entries = Late("engine.cache.level_entries:QuantizedEntries")
_few_entries = Late("engine.cache.level_entries:FewEntries")
_window_entries = Late("engine.cache.window_entries:window_entries")
SCRATCH_BYTES = 512 * 1024 * 1024
"""What scoring takes at once, unless a single window needs more."""
SWAP_STAGING_BYTES = 64 * 1024 * 1024
"""Most memory that swapped blocks are staged in, on the device and pinned on the host."""


class Writer(Protocol):
    """A cache group that takes something of every token from its layers."""

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one layer's new keys and values, both [T, Hkv, D], at ``slots [LG, R, T]``."""
        ...


class KVCache:
    """``kv [num_blocks, L/LG, ...]``, read and written as ``entries`` and as ``query_log``.

    ``form`` is what an entry is stored as (default: numbers of ``dtype``, as they are computed);
    of few bits, ``few`` says what each layer of the model is. ``layers`` are those of the model
    (default: as many as the layout has, of one kind).
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        log: LogForm,
        dtype: torch.dtype,
        device: str,
        *,
        num_host_blocks: int = 0,
        form: EntryFormat | None = None,
        layers: LayerKinds | None = None,
        kernels: StorageKernels | None = None,
        few: tuple[FewLayer, ...] = (),
    ) -> None:
        kernels = kernels or by_device(device, layout.head_dim)
        self.layout = layout
        self.layers = layers or LayerKinds(layout.num_layers)
        self.form = form or entry_format("auto", dtype.itemsize)
        self.dtype = dtype
        stored = torch.uint8 if self.form.quantized else dtype
        shape = memory_shape(layout, self.form, num_blocks)
        self.kv = torch.empty(shape, dtype=stored, device=device)
        if device == "cpu":
            use_large_pages(self.kv.data_ptr(), self.kv.nbytes, written=False)
        self.kv.zero_()
        # Block 0 is a null block here too. Not pinned: such memory is rounded up to a power of two.
        # On a CPU, pages that no swap has written cost no memory. Beside a GPU they are written
        # now: the first write to a page takes seven times as long, and a step would wait for it.
        made = torch.zeros if device == "cuda" else torch.empty
        self.host = made(num_host_blocks + 1, *shape[1:], dtype=stored, device="cpu")
        staged = min(num_host_blocks, max(1, SWAP_STAGING_BYTES // self.kv[0].nbytes))
        self._staging = torch.empty(
            staged, *shape[1:], dtype=stored, device="cpu", pin_memory=device == "cuda"
        )
        self.entries = RawEntries(self.kv, kernels)
        if few:
            sizes = layout.heads_per_block, layout.block_size, layout.head_dim
            blocks = kernels.few.blocks(self.kv.flatten(1), few, *sizes)
            self.entries = _few_entries(blocks, kernels, dtype, self.layers.full)
        elif self.form.quantized:
            blocks = _quantized_blocks(self.kv, self.form, layout.block_size, layout.head_dim)
            self.entries = _quantized_entries(blocks, kernels, dtype)
        self._windows = self.entries
        if layout.windows is not None:
            self._windows = _window_entries(self.kv, layout, self.form, kernels, dtype)
        self._log = log
        self.logs_shares = log.dtype == "int4"
        self.on_queries: Callable[[int, ForwardBatch, Tensor], None] | None = None
        """Called with each layer's queries [T, Hq, D], for who measures them."""
        self._kernels = kernels
        self._newest: RawEntries | None = None
        self.rest: list[tuple[AnyLevels, AnyLevels]] = []
        """By a layer's number among those that see all tokens: what ``ForwardBatch.rest`` sees."""
        self.writers: list[Writer] = []
        """In the order of ``ForwardBatch.further``."""

    @cached_property
    def query_log(self) -> QueryLog:
        """Its blocks, read as logged queries; nobody needs it before the first."""
        tokens = self._log.block_tokens(self.layout, self.form, self.dtype.itemsize)
        logged = self.kv, self.layout, self._log, tokens, self.dtype, self._kernels
        log: QueryLog = _query_log(*logged)
        return log

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Write one layer's new keys and values: k, v [T, Hkv, D]."""
        place, slots = self._slots(layer, batch)
        entries = self._entries_of(layer)
        entries.write(entries.index(layer, place), slots, k, v)
        if self.writers:
            k, v = self.entries.turn(k, layer), self.entries.turn(v)
        for writer, slots in zip(self.writers, batch.further, strict=False):
            writer.write(layer, slots, k, v)

    def turn(self, x: Tensor) -> Tensor:
        """Queries [T, Hq, D] as entries are held, or attention's output turned back; the same, if
        entries are held as they came."""
        return self.entries.turn(x)

    @property
    def rotate_and_store(self) -> RotateAndStore | None:
        """``None`` if entries are not stored as they come, or others take rotated keys as well."""
        known = self.entries.store_rotated is not None and not self.writers
        return self._rotate_and_store if known else None

    def _rotate_and_store(
        self, layer: int, batch: ForwardBatch, qk: Tensor, v: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        assert self.entries.store_rotated is not None
        place, slots = self._slots(layer, batch)
        return self.entries.store_rotated(self.entries.memory, place, slots, qk, v, cos, sin)

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        """Write one layer's queries [T, Hq, D] where they are logged, with ``shares`` [T, Hq].

        Those of layers with windows are not: no event observes them.
        """
        if self.on_queries is not None:
            self.on_queries(layer, batch, q)
        if batch.query_slots is not None and layer not in self.layers.windowed:
            group, place = self._where(layer)
            self.query_log.store(place, batch.query_slots[group], q, shares)

    def swap(self, moves: RowMoves) -> None:
        """Swap blocks out to host memory, copy blocks on the device, then swap blocks in.

        Blocks of logged queries are treated as all others.
        """
        for task in moves.outs:
            for device, host, staged in self._blocks(task):
                staged.copy_(self.kv[device])
                self.host[host] = staged
        if len(moves.copy_from):
            sources = to_device(moves.copy_from, self.kv.device)
            self.kv[to_device(moves.copy_to, self.kv.device)] = self.kv[sources]
        for task in moves.ins:
            for device, host, staged in self._blocks(task):
                torch.index_select(self.host, 0, host, out=staged)
                self.kv[device] = staged.to(self.kv.device)

    def _blocks(self, task: RowMove) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield device blocks, host blocks and staging memory, as many blocks as it takes at once.

        The staging memory is reused each time, so copies from and to it have to be synchronous.
        """
        count = max(1, len(self._staging))
        for at in range(0, len(task.device_blocks), count):
            part = slice(at, at + count)
            host = to_device(task.host_blocks[part], "cpu")
            device = to_device(task.device_blocks[part], self.kv.device)
            yield device, host, self._staging[: len(host)]

    def keys_values(self, layer: int) -> tuple[Entries, Entries, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group among those
        of its kind."""
        group, place = self._where(layer)
        entries = self._entries_of(layer)
        return *entries.layer(entries.index(layer, place)), group

    def hold_newest(self, tokens: int) -> None:
        """Let blocks be read as ``tokens`` entries as they were computed, too."""
        layout = self.layout
        shape = layout.layers_per_block, 2, tokens, layout.heads_per_block, layout.head_dim
        blocks = self.kv.flatten(1).view(self.dtype)[:, : math.prod(shape)]
        self._newest = RawEntries(blocks.unflatten(1, shape), self._kernels)

    def write_newest(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store one layer's new entries as they were computed: slots [LG, R, T] of all layers that
        see all tokens, then of those with windows."""
        assert self._newest is not None
        group, place = self._where(layer)
        if layer in self.layers.windowed:
            group -= -(-len(self.layers.windowed) // self.layout.layers_per_block)
        self._newest.write(place, slots[group], k, v)

    def newest_keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """As ``keys_values``, of entries as they were computed."""
        assert self._newest is not None
        group, place = self._where(layer)
        blocks = self._newest.memory[:, place]
        return blocks[:, 0], blocks[:, 1], group

    def rest_keys_values(self, layer: int) -> tuple[AnyLevels, AnyLevels]:
        """As ``keys_values``, of the rest, which has one layer group."""
        return self.rest[self.layers.places[layer]]

    def _slots(self, layer: int, batch: ForwardBatch) -> tuple[int, Tensor]:
        """A layer's place in a block, and where its new entries go: [R, T]."""
        group, place = self._where(layer)
        own = batch.windowed if layer in self.layers.windowed else batch
        assert own is not None, "a batch has the tables of all kinds of layers"
        return place, own.slots[group]

    def _entries_of(self, layer: int) -> RawEntries:
        return self._windows if layer in self.layers.windowed else self.entries

    def _where(self, layer: int) -> tuple[int, int]:
        """A layer's group among those of its kind, and its place in a block."""
        own = (layer in self.layers.windowed and self.layout.windows) or self.layout
        return divmod(self.layers.places[layer], own.layers_per_block)
