"""What differs between the kinds of events: what they leave, and the blocks they take and give.

What they do on the device is in ``engine/compression/event_runner.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.code_group import CodeGroup
from kvserve.scheduler.messages.event import CodeBlocks, Events
from kvserve.scheduler.triggers.periodic import QuantizeTrigger
from kvserve.scheduler.triggers.trigger import NO_EVENT, EventKind, RowState, Trigger


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
        counts = np.maximum(ends.max(axis=(0, 2)) - first, 0)
        owner = np.repeat(np.arange(len(rows)), counts)
        column = np.repeat(first, counts) + ragged_arange(counts)
        copy_start, shared = start.copy(), kv.is_shared(rows[owner], column, ends[:, owner])
        if shared.any():
            if not blocks.have_free(int(shared.sum()), for_event=True):
                # Blocks that only a row and a cache name are writable once the cache drops them.
                blocks.forget(kv.blocks[:, rows[owner], :, column].ravel())
                shared = kv.is_shared(rows[owner], column, ends[:, owner])
            missing = np.bincount(owner, shared.sum(axis=(1, 2)), len(rows)).cumsum()
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


@dataclass(frozen=True, slots=True)
class Coding:
    """What a row holds after one event; all ``[LG, R]``.

    Of ``kv_lens`` entries the first ``coded`` are held as codes, with ``num_vectors`` vectors. With
    ``afresh`` the whole row is written again; otherwise its raw entries stay where they are.
    """

    kv_lens: IntArray
    coded: IntArray
    num_vectors: IntArray
    afresh: bool


class HostCodedEvents(HostUnevenEvents):
    """Events that write codes. They go before all others, the oldest first: they evict little, so
    an old one might wait forever behind newer events that evict more.
    """

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__(blocks)
        self._codes = blocks.find(CodeGroup)

    def rank(self, events: Events) -> IntArray:
        return np.full(len(events.rows), NO_EVENT)

    def take_blocks(self, events: Events) -> Events | None:
        """Change rows to what ``choices`` say, in order, until one finds no blocks."""
        blocks, kv, groups = self._blocks, self._blocks.kv, self._codes
        assert groups is not None
        size, rows, released = blocks.layout.block_size, events.rows, list[int]()
        before = groups.coded[:, rows].copy(), groups.num_vectors[:, rows].copy()
        for row, coding in zip(rows.tolist(), events.choices, strict=True):
            at, first = np.array([row]), coding.coded // size
            # Blocks that the event takes before it gives any back, and those that it gives back.
            wanted = groups.index.missing_blocks(at, coding.coded[:, None])
            wanted += groups.vectors.missing_blocks(at, coding.num_vectors[:, None])
            if coding.afresh:
                wanted += int((-(-coding.kv_lens // size) - first).sum())
                named = kv.row_blocks(row)
                own = int(np.count_nonzero(blocks.pool.ref[named] == 1))
                if not blocks.have_free(wanted - own, for_event=True):
                    blocks.forget(named)
                    own = int(np.count_nonzero(blocks.pool.ref[named] == 1))
            else:  # generated entries, whose blocks are not shared
                own = int(((coding.coded - groups.coded[:, row]) // size).sum())
            if not blocks.have_free(wanted - own, for_event=True):
                break
            held = int(blocks.blocks_of_rows(row + 1)[row])
            if coding.afresh:
                kv.truncate(at, np.zeros_like(first)[:, None])
            kv.move_front(at, first[:, None])
            kv.extend(at, coding.kv_lens[:, None])
            groups.index.extend(at, coding.coded[:, None])
            groups.vectors.extend(at, coding.num_vectors[:, None])
            groups.coded[:, row], groups.num_vectors[:, row] = coding.coded, coding.num_vectors
            blocks.kv_lens[:, row] = coding.kv_lens
            released.append(max(held - int(blocks.blocks_of_rows(row + 1)[row]), 0))
        done = len(released)
        if not done:
            return None
        rows, (coded, vectors) = rows[:done], (numbers[:, :done] for numbers in before)
        named_by = (
            table.blocks[:, rows, :, : table.end[:, rows].max(initial=0)].copy()
            for table in groups.tables
        )
        now = groups.coded[:, rows], groups.num_vectors[:, rows]
        codes = CodeBlocks(coded, now[0], vectors, now[1], *named_by)
        return replace(
            events.part(slice(done)),
            copy_start=np.zeros(done, np.int32),
            released=np.array(released, np.int32),
            codes=codes,
        )

    def next_event(self, at: IntArray, state: RowState, due: IntArray) -> IntArray:
        """A row that stayed raw at its prompt's end has no more events."""
        if self._codes is None:
            return due
        raw = ~self._codes.coded[:, at].any(axis=(0, 2)) & (state.first_uncompressed_pos > 0)
        return np.where(raw, NO_EVENT, due).astype(due.dtype)

    def _outcome(
        self, due: Events, trigger: Trigger, i: int, kept: IntArray
    ) -> tuple[IntArray, Any]:
        """With ``raw_fallback`` a lane stays raw for good if its codes would take as many blocks as
        its entries."""
        assert isinstance(trigger, QuantizeTrigger) and self._codes is not None
        codes, row, old_lens = self._codes, int(due.rows[i]), due.old_lens[:, i]
        entries, vectors = kept[..., 0], kept[..., 1]
        if not due.plan.window_len[i]:  # they are coded in addition
            coded, num_vectors = codes.coded[:, row] + entries, codes.num_vectors[:, row] + vectors
            return old_lens, Coding(old_lens, coded, num_vectors, False)
        size = self._blocks.layout.block_size
        coded = entries // size * size
        if trigger.raw_fallback:
            index, book = -(-coded // codes.slots_per_block), -(-vectors // codes.vectors_per_block)
            coded = np.where(coded // size > index + book, coded, 0)
        return entries, Coding(entries, coded, np.where(coded > 0, vectors, 0), True)


HANDLERS: dict[EventKind, type[HostEvenEvents]] = {
    EventKind.EVEN: HostEvenEvents,
    EventKind.UNEVEN: HostUnevenEvents,
    EventKind.BLOCKS: HostBlockEvents,
    EventKind.CODED: HostCodedEvents,
    EventKind.PRUNED: HostUnevenEvents,
}
