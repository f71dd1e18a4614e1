"""Even events that drop nothing: what is not kept goes to the row's rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
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
        owner, given = self._given(events, ends[0, :, 0])
        own = np.bincount(owner, self._blocks.pool.ref[given] == 1, len(events.rows))
        taken = self._rest.missing(events.rows, events.plan.evicted) - own.astype(np.int64)
        return np.asarray(np.maximum(taken, 0))

    def take_blocks(self, events: Events) -> Events | None:
        taken = super().take_blocks(events)
        if taken is None:  # what caches name as well comes free once they drop it
            ends = -(-events.new_lens[0, :, 0] // self._blocks.layout.block_size)
            self._blocks.forget(self._given(events, ends)[1])
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

    def _given(self, events: Events, ends: IntArray) -> tuple[IntArray, IntArray]:
        """The blocks of keys and values that events give back, from columns ``ends [E]`` on, and
        each one's event."""
        kv, rows = self._blocks.kv, events.rows
        counts = np.maximum(kv.end[0, rows, 0] - ends, 0)
        owner = np.repeat(np.arange(len(rows)), counts)
        return owner, kv.blocks[0, rows[owner], 0, np.repeat(ends, counts) + ragged_arange(counts)]
