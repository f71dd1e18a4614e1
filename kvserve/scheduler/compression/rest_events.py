"""Even events that drop nothing: what is not kept goes to the row's rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.rest_group import RestGroup
from kvserve.scheduler.compression.handlers import HostEvenEvents
from kvserve.scheduler.messages.event import Events, RestBlocks


class HostRestEvents(HostEvenEvents):
    """An event gives blocks of keys and values back, and takes some of them for the rest. On the
    device a step's events read all that they move before they write any of it, so they may take
    each other's."""

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__(blocks)
        group = blocks.find(RestGroup)
        assert group is not None, "an engine whose policy has a rest has its group"
        self._rest = group

    def taken_beside(self, events: Events, ends: IntArray) -> IntArray:
        kv, ref = self._blocks.kv, self._blocks.pool.ref
        own = [  # that nobody else names
            int(np.count_nonzero(ref[kv.blocks[0, row, 0, end : kv.end[0, row, 0]]] == 1))
            for row, end in zip(events.rows.tolist(), ends[0, :, 0].tolist(), strict=True)
        ]
        taken = self._rest.missing(events.rows, events.plan.evicted)
        return np.asarray(np.maximum(taken - np.array(own, taken.dtype), 0))

    def take_blocks(self, events: Events) -> Events | None:
        taken = super().take_blocks(events)
        if taken is None:
            return None
        rest, rows = self._rest, taken.rows
        size, added = rest.table.block_tokens, taken.plan.evicted
        before, more = rest.rest_lens[rows].copy(), rest.missing(rows, added)
        rest.add(rows, added)
        first = before // size
        width = int((-(-rest.rest_lens[rows] // size) - first).max(initial=0))
        columns = np.minimum(first[:, None] + np.arange(width), rest.table.blocks.shape[3] - 1)
        named = rest.table.blocks[0, rows[:, None], 0, columns]
        released = np.maximum(taken.released - more, 0).astype(np.int32)
        return replace(taken, released=released, rest=RestBlocks(before, named))
