"""A draft model's keys and values, in blocks of the engine's pool that have a layout of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import Entries, ForwardBatch, StoreKV
from kvserve.engine.cache.entry_store import RawEntries
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.device.transfer import to_device
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.draft_group import DraftSpec
from kvserve.scheduler.layout import Granularity, KVLayout

_FEW_TOKENS = 8
"""Blocks of fewer tokens make long tables; finer layouts have more tokens in each."""


def draft_layout(shape: KVLayout, block_bytes: int, itemsize: int) -> KVLayout | None:
    """The layout in which blocks of ``block_bytes`` hold entries of ``shape``'s layers and heads.

    ``block_size`` of the result is how many tokens fit. All layers and heads share a block, unless
    too few tokens fit then; a few bytes may be left over. ``None``: not even one head's entry fits.
    """
    found = None
    for granularity in Granularity:
        layout = replace(shape, block_size=1, granularity=granularity)
        tokens = block_bytes // (layout.block_elements * itemsize)
        if tokens:
            found = replace(layout, block_size=tokens)
        if tokens >= min(_FEW_TOKENS, shape.block_size):
            break
    return found


class DraftRows(RowGroup):
    """Blocks of the tokens that the draft model has read and still holds, in their order."""

    spec_type = DraftSpec

    def batch(
        self,
        rows: IntArray,
        starts: IntArray,
        dropped: IntArray,
        lengths: IntArray,
        prompt_lens: Tensor,
        window: int | None,
    ) -> ForwardBatch:
        """Chunks of ``lengths [n]`` tokens from positions ``starts [n]`` on of ``rows [n]``; each
        token sees all before it but the ``dropped [n]``, and the newest ``window`` of them in
        layers with windows, if there are any. ``prompt_lens`` are of all rows."""
        (table,), device = self.tables, prompt_lens.device
        by_token = to_device(np.repeat(rows, lengths), device)
        positions = to_device(np.repeat(starts, lengths) + ragged_arange(lengths), device)
        places = positions - to_device(np.repeat(dropped, lengths), device)
        batch = ForwardBatch(
            positions=positions,
            prompt_lens=prompt_lens[by_token],
            slots=self.slots(by_token, places),
            query_slots=None,
            last=places.expand(table.shape[0], table.shape[2], -1).contiguous(),
            tables=table,
            rows=rows,
            starts=np.concatenate([np.zeros(1, lengths.dtype), np.cumsum(lengths)]),
            columns=-(-(starts - dropped + lengths) // self.spec.block_tokens),
        )
        if window is None:
            return batch
        lanes = self.first(places, to_device(np.repeat(dropped, lengths), device), window)
        most_seen = window + int(lengths.max())
        first = lanes.expand_as(batch.last).contiguous()
        return replace(batch, windowed=replace(batch, first=first, most_seen=most_seen))

    def first(self, places: Tensor, dropped: Tensor, window: int) -> Tensor:
        """The first entry that layers with windows see from ``places [T]`` of rows that have lost
        ``dropped [T]`` tokens. Sinks are no part of a window once others are gone."""
        assert isinstance(self.spec, DraftSpec)
        front = torch.where(dropped > 0, self.spec.front_tokens, 0)
        return torch.maximum(places - window + 1, front)


KINDS.append(DraftRows)


class DraftCache:
    """The blocks of ``pool``, whatever it holds, as those of ``layout`` and ``dtype``."""

    logs_shares = False
    rotate_and_store = None

    def __init__(
        self, pool: Tensor, layout: KVLayout, dtype: torch.dtype, store_kv: StoreKV
    ) -> None:
        self.layout, self.dtype = layout, dtype
        used = layout.block_elements * dtype.itemsize
        memory = pool.flatten(1).view(torch.uint8)[:, :used].view(dtype)
        self._entries = RawEntries(memory.unflatten(1, layout.cache_shape(1)[1:]), store_kv)

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Write one layer's new keys and values: k, v [T, Hkv, D]."""
        group, place = self._where(layer)
        self._entries.write(place, batch.slots[group], k, v)

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        """No event observes a draft model."""

    def keys_values(self, layer: int) -> tuple[Entries, Entries, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        group, place = self._where(layer)
        return *self._entries.layer(place), group

    def _where(self, layer: int) -> tuple[int, int]:
        return divmod(layer, self.layout.layers_per_block)
