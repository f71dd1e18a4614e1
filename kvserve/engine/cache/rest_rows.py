"""The rest of rows on the device: what their events did not keep, in bits by layer and KV head."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.entry_table import side_by_side
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.level_entries import FewEntries
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.entry_format import TILE, EntryFormat, bits_of_layers, mean_levels
from kvserve.log import ConfigError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.rest_group import RestSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.row_schema import per_row


def rest_spec(layout: KVLayout, block_bytes: int, bits: float, form: EntryFormat) -> RestSpec:
    """The group of a rest of at least ``bits`` a number on average, more where blocks have room.

    ``ConfigError``: it cannot be beside entries of ``form`` in this layout.
    """
    if not form.few:
        raise ConfigError(
            f"--policy.rest_bits: a rest is read by the queries of entries in few bits, not of "
            f"{form.name}; use --kv-cache-dtype 3bit"
        )
    if layout.groups > 1:
        raise ConfigError(
            "--policy.rest_bits: all layers and heads share a block; use --kv-layout model"
        )
    lanes = layout.num_layers * layout.num_kv_heads
    dim = layout.head_dim
    entry = 2 * lanes * (1 + mean_levels(bits, dim, bits_of_layers(dim, least=1)))
    tokens = int(block_bytes / entry) // TILE * TILE
    if tokens <= layout.block_size:
        raise ConfigError(
            f"--policy.rest_bits: {bits:g} bits save no block beside {form.name} in blocks of "
            f"{layout.block_size}; lower it, or use a larger --block-size"
        )
    return RestSpec(tokens, lanes)


class RestRows(RowGroup):
    """Blocks of the rest, and how many entries of it each row has, in every lane."""

    spec_type = RestSpec
    spec: RestSpec
    rest_lens: Tensor = per_row()

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        (table,) = self.tables
        self.make_by_row(
            lambda fields: torch.zeros(
                (fields, table.shape[1]), dtype=torch.int64, device=table.device
            )
        )

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        assert isinstance(cache.entries, FewEntries) and model.entry_table is not None
        layout, size = cache.layout, self.spec.block_tokens
        held, self._heads = cache.entries.blocks, layout.num_kv_heads
        left = cache.kv[0].nbytes // size - 2 * self.spec.lanes
        lanes = [(layer, head) for layer in cache.layers.full for head in range(self._heads)]
        forms = [(held.layers[layer].key, held.layers[layer].value) for layer, _ in lanes]
        most = [form.bits for both in forms for form in both]
        bits = model.entry_table.bits_of_heads(lanes, layout.head_dim, left, most)
        shapings = [held.layers[layer].shaping.heads(head, 1) for layer, head in lanes]
        layers = tuple(side_by_side(bits, shapings, size, layout.head_dim, 1))
        pool = cache.kv.flatten(1)
        self.blocks = cache.entries.few.blocks(pool, layers, 1, size, layout.head_dim)
        self._entries = cache.entries
        self._equal = [
            (lane, held.layer(layer)[kind], own)
            for lane, (layer, _) in enumerate(lanes)
            for kind, own in enumerate(self.blocks.layer(lane))
            if own.form == held.layer(layer)[kind].form
        ]
        """Lanes' keys or values of as many bits as the entries have, with both."""
        cache.rest = [
            self.blocks.beside(first, self._heads) for first in range(0, len(lanes), self._heads)
        ]

    def after_compaction(self, task: Events, rows: Tensor) -> None:
        if task.rest is not None:
            ends = task.rest.before + task.plan.evicted
            self.rest_lens[rows] = to_device(ends, self.rest_lens.device)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What slots [L, Hkv, S] of keys and values hold: numbers float32 [L, Hkv, S, D], and the
        bytes of those that the rest holds in as many bits."""
        lanes, blocks = slots.flatten(0, 1), self._entries.blocks
        copies = [
            blocks.bytes_at(held, lanes[lane : lane + 1], lane % self._heads)
            for lane, held, _ in self._equal
        ]
        return *self._entries.numbers(slots), copies

    def append(self, slots: Tensor, keys: Tensor, values: Tensor, copies: list[Tensor]) -> None:
        """Store what ``read`` returned in slots int64 [S] of all lanes: rounded anew, but where the
        rest has as many bits."""
        everywhere, lanes = slots[None], range(self.spec.lanes)
        new = (x.flatten(0, 1)[:, :, None] for x in (keys, values))  # [L * Hkv, S, 1, D]
        self._entries.few.store_layers(self.blocks, lanes, everywhere, *new)
        for (_, _, own), copy in zip(self._equal, copies, strict=True):
            own.tiles[self.blocks.entries_at(own, everywhere)] = copy

    def over(
        self, batch: ForwardBatch, rows: Tensor, columns: IntArray, rounded_at: Tensor
    ) -> ForwardBatch:
        return self._beside(batch, self.rest_lens[rows] - 1)

    def nothing_of(self, batch: ForwardBatch) -> ForwardBatch:
        return self._beside(batch, torch.full_like(batch.positions, -1))

    def update(self, batch: ForwardBatch, rows: Tensor, real: Tensor, rounded_at: Tensor) -> None:
        assert batch.rest is not None
        batch.rest.last.copy_(torch.where(real, self.rest_lens[rows] - 1, -1))

    def _beside(self, batch: ForwardBatch, last: Tensor) -> ForwardBatch:
        (table,) = self.tables
        rest = replace(
            batch,
            slots=batch.slots[..., :0],
            query_slots=None,
            last=last.expand(1, 1, -1).contiguous(),
            tables=table,
            first=None,
            always=None,
            recent=None,
            remainders=None,
            further=(),
            windowed=None,
            newest=None,
            most_seen=table.shape[3] * self.spec.block_tokens,
            block_tokens=self.spec.block_tokens,
        )
        return replace(batch, rest=rest)


KINDS.append(RestRows)
