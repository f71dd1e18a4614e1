"""What differs between the kinds of events: what they leave, and the blocks they take and give.

``kinds.py`` says which handler is whose, and what does the same on the device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.triggers.trigger import RowState, Trigger


class HostEvenEvents:
    """Events that leave equally many entries in all lanes; their trigger says how many."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def outcomes(
        self, due: Events, trigger: Trigger, scored: list[IntArray | None]
    ) -> list[Events]:
        """The ``due`` events with the lengths that they leave, if known; ``scored``: the device's
        answer for each event that has one."""
        return [replace(due, new_lens=due.old_lens - due.plan.evicted[None, :, None])]

    def rank(self, events: Events) -> IntArray:
        """Ranks of events; the highest goes first."""
        return events.plan.evicted

    def take_blocks(self, events: Events) -> Events | None:
        """Exchange blocks event by event until one finds too few: those before it, with where they
        write and what they ``released``; ``None`` if that is the first.

        A block with more than one reference is read-only. So columns that an event writes get
        private blocks, and their earlier entries move along.
        """
        blocks, kv, size = self._blocks, self._blocks.kv, self._blocks.layout.block_size
        rows, start, new = events.rows, events.plan.region_start, events.new_lens
        # Columns of the entries [start, new): their event, their number, and each lane's last one.
        first, ends = start // size, -(-new // size)
        counts = np.maximum(ends.max(axis=(0, 2)) - first, 0) * ~events.scores_alone
        owner = np.repeat(np.arange(len(rows)), counts)
        column = np.repeat(first, counts) + ragged_arange(counts)
        copy_start, shared = start.copy(), kv.is_shared(rows[owner], column, ends[:, owner])
        more = self.taken_beside(events, ends)
        if shared.any() or more.any():
            if not blocks.have_free(int(shared.sum() + more.sum()), for_event=True):
                # Blocks that only a row and a cache name are writable once the cache drops them.
                blocks.forget(kv.blocks[:, rows[owner], :, column].ravel())
                shared = kv.is_shared(rows[owner], column, ends[:, owner])
                more = self.taken_beside(events, ends)
            missing = (np.bincount(owner, shared.sum(axis=(1, 2)), len(rows)) + more).cumsum()
            count = int(np.searchsorted(missing, blocks.pool.num_free, side="right"))
            if not count:
                return None
            events, mine = events.part(slice(count)), owner < count
            owner, column, copy_start = owner[mine], column[mine], copy_start[:count]
            replaced = kv.replace_shared(rows[owner], column, ends[:, owner])
            np.minimum.at(copy_start, owner[replaced], column[replaced] * size)
        blocks.kv_lens[:, events.rows] = events.new_lens
        released = kv.truncate(events.rows, ends[:, : len(events.rows)])
        return replace(events, copy_start=copy_start, released=released)

    def taken_beside(self, events: Events, ends: IntArray) -> IntArray:
        """Blocks that each event takes beyond those that it gives back, which are a row's from the
        columns ``ends [LG, E, R]`` on: [E]."""
        return np.zeros(len(events.rows), np.int64)

    def next_event(self, at: IntArray, state: RowState, due: IntArray) -> IntArray:
        """When rows ``at`` are due next, if their trigger says ``due``."""
        return due


class HostUnevenEvents(HostEvenEvents):
    """Events whose counts the scores decide."""

    def outcomes(
        self, due: Events, trigger: Trigger, scored: list[IntArray | None]
    ) -> list[Events]:
        """First the events whose lengths are known, then the others."""
        new, choices = due.old_lens.copy(), np.empty(len(scored), object)
        for i, kept in enumerate(scored):
            if kept is not None:
                new[:, i], choices[i] = self._outcome(due, trigger, i, kept)
        known = np.array([kept is not None for kept in scored], bool)
        return [replace(due, new_lens=new, choices=choices).part(known), due.part(~known)]

    def _outcome(
        self, due: Events, trigger: Trigger, i: int, kept: IntArray
    ) -> tuple[IntArray, Any]:
        """Entries ``[LG, R]`` that event ``i`` leaves if the device answers ``kept [LG, R, ...]``,
        and what ``take_blocks`` has to know."""
        return kept + due.plan.region_start[i], None


class HostBlockEvents(HostUnevenEvents):
    """Events that keep whole blocks: no entry moves, so shared blocks may stay shared."""

    def take_blocks(self, events: Events) -> Events | None:
        blocks, released = self._blocks, []
        blocks.kv_lens[:, events.rows] = events.new_lens
        for row, columns in zip(events.rows.tolist(), events.choices, strict=True):
            released.append(blocks.kv.keep(row, columns[..., columns[0, 0] >= 0]))
        nothing = events.new_lens.max(axis=(0, 2))  # is copied
        return replace(events, copy_start=nothing, released=np.array(released, np.int32))

    def _outcome(
        self, due: Events, trigger: Trigger, i: int, kept: IntArray
    ) -> tuple[IntArray, Any]:
        return due.plan.keep[i], kept
