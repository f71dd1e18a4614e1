"""Events that make codes of entries: what they leave, and the blocks they take and give."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.code_group import CodeGroup
from kvserve.scheduler.compression.handlers import HostUnevenEvents
from kvserve.scheduler.messages.event import CodeBlocks, Events
from kvserve.scheduler.triggers.periodic import QuantizeTrigger
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState, Trigger


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
