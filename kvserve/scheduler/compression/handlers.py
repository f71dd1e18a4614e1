"""What differs between the kinds of events: what they leave, and the blocks they take and give.

What they do on the device is in ``engine/compression/event_runner.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.code_group import CodeGroup
from kvserve.scheduler.compression.candidates import Choices, EventCandidates, OpenEvent
from kvserve.scheduler.messages.event import CodeCounts, EventKind, KeptColumns, KeptCounts
from kvserve.scheduler.messages.output import CodeBlocks
from kvserve.scheduler.triggers.code_trigger import QuantizeTrigger
from kvserve.scheduler.triggers.pruning import Pruned
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState

Scored = Callable[[EventCandidates], list[OpenEvent | None]]


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """What the first n events have done to tables and lengths; all ``[n]``.

    Entries from ``copy_start`` on are written again; ``released`` blocks came free.
    """

    copy_start: IntArray
    released: IntArray
    codes: CodeBlocks | None = None


class HostEvenEvents:
    """Events that leave equally many entries in all lanes; their trigger says how many."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks

    def outcomes(self, due: EventCandidates, scored: Scored) -> list[EventCandidates]:
        """The ``due`` events with the lengths that they leave, if known; ``scored`` looks up their
        scores."""
        new = due.old - due.plan.evicted[None, :, None]
        return [replace(due, new=new, known=True)]

    def rank(self, events: EventCandidates) -> IntArray:
        """Ranks of events; the highest goes first."""
        return events.plan.evicted

    def take_blocks(self, events: EventCandidates) -> TakenBlocks | None:
        """Exchange blocks event by event until one finds too few; ``None`` if that is the first."""
        at, start, new = events.at, events.plan.region_start, events.new
        count = self._blocks.affordable(at, start, new)
        if not count:
            return None
        at, start, new = at[:count], start[:count], new[:, :count]
        return TakenBlocks(
            self._blocks.make_private(at, start, new), self._blocks.truncate(at, new)
        )

    def next_event(self, at: IntArray, state: RowState, due: IntArray) -> IntArray:
        """When rows ``at`` are due next, if their trigger says ``due``."""
        return due


class HostUnevenEvents(HostEvenEvents):
    """Events whose counts the scores decide."""

    def outcomes(self, due: EventCandidates, scored: Scored) -> list[EventCandidates]:
        """First the events whose lengths are known, then the others."""
        events = scored(due)
        known = np.array([event is not None for event in events], bool)
        new, choices = due.old.copy(), np.empty(len(events), object)
        for i, event in enumerate(events):
            if event is not None:
                new[:, i], choices[i] = self._outcome(due, i, event)
        both = replace(due, new=new, choices=choices)
        return [replace(both.part(known == done), known=done) for done in (True, False)]

    def _outcome(self, due: EventCandidates, i: int, event: OpenEvent) -> tuple[IntArray, Any]:
        """Entries ``[LG, R]`` that event ``i`` leaves, and what ``take_blocks`` has to know."""
        assert isinstance(event.scores, KeptCounts)
        return event.scores.counts[:, event.place] + due.plan.region_start[i], None


class HostBlockEvents(HostUnevenEvents):
    """Events that keep whole blocks: no entry moves, so shared blocks may stay shared."""

    def take_blocks(self, events: EventCandidates) -> TakenBlocks | None:
        kept = zip(events.at.tolist(), _choices(events), events.new.transpose(1, 0, 2), strict=True)
        released = np.array([self._blocks.keep_columns(*one) for one in kept], np.int32)
        return TakenBlocks(events.new.max(axis=(0, 2)), released)  # nothing is copied

    def _outcome(self, due: EventCandidates, i: int, event: OpenEvent) -> tuple[IntArray, Any]:
        assert isinstance(event.scores, KeptColumns)
        return due.plan.keep[i], event.scores.columns[:, event.place]


class HostCodedEvents(HostUnevenEvents):
    """Events that write codes. They go before all others, the oldest first: they evict little, so
    an old one might wait forever behind newer events that evict more.
    """

    def __init__(self, blocks: BlockManager) -> None:
        super().__init__(blocks)
        self._codes = blocks.find(CodeGroup)

    def rank(self, events: EventCandidates) -> IntArray:
        return np.full(len(events.at), NO_EVENT)

    def take_blocks(self, events: EventCandidates) -> TakenBlocks | None:
        assert self._codes is not None
        released, codes = self._codes.code(self._blocks, events.at, _choices(events))
        return None if codes is None else TakenBlocks(np.zeros_like(released), released, codes)

    def next_event(self, at: IntArray, state: RowState, due: IntArray) -> IntArray:
        """A row that stayed raw at its prompt's end has no more events."""
        if self._codes is None:
            return due
        raw = ~self._codes.coded[:, at].any(axis=(0, 2)) & (state.first_uncompressed_pos > 0)
        return np.where(raw, NO_EVENT, due).astype(due.dtype)

    def _outcome(self, due: EventCandidates, i: int, event: OpenEvent) -> tuple[IntArray, Any]:
        assert isinstance(event.scores, CodeCounts) and isinstance(due.trigger, QuantizeTrigger)
        assert self._codes is not None
        coding = self._codes.plan(
            int(due.at[i]),
            due.old[:, i],
            event.scores.entries[:, event.place],
            event.scores.vectors[:, event.place],
            afresh=bool(due.plan.window_len[i]),
            raw_fallback=due.trigger.raw_fallback,
        )
        return coding.kv_lens, coding


class HostPrunedEvents(HostUnevenEvents):
    """A prompt's own event, scheduled in the step that computes the prompt; others are uneven."""

    def in_prompt(self, due: EventCandidates, num_prompt: int) -> EventCandidates:
        """The only event in ``due``, with the entries that each layer will hold of its prompt."""
        assert isinstance(due.trigger, Pruned)
        by_layer = due.trigger.prompt_lengths(num_prompt, due.layout.num_layers)
        lengths = np.array(by_layer, np.int32)[:, None, None]
        return replace(due, new=np.broadcast_to(lengths, due.old.shape).copy(), known=True)


HANDLERS: dict[EventKind, type[HostEvenEvents]] = {
    EventKind.EVEN: HostEvenEvents,
    EventKind.UNEVEN: HostUnevenEvents,
    EventKind.BLOCKS: HostBlockEvents,
    EventKind.CODED: HostCodedEvents,
    EventKind.PRUNED: HostPrunedEvents,
}


def _choices(events: EventCandidates) -> Choices:
    assert events.choices is not None
    return events.choices
