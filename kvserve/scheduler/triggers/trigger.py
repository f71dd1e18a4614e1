"""When a sequence is due for compaction, and what an event does to its lengths.

Events are due at logical positions of the sequence itself, so what happens to a sequence depends
neither on its neighbours nor on its chunks or preemptions. The scheduler reads only these objects;
policies (which need tensors) hand them out. Every method takes all rows of one trigger at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from kvserve.scheduler.arrays import IntArray

NO_EVENT = 2**31 - 1
ONE_WINDOW = 2**31 - 1
"""``log_span`` if queries are logged for one window at a time."""
NOT_LOGGING = 2**31 - 1


class EventKind(enum.Enum):
    """What decides how much an event keeps, and in which form: ``compression/kinds.py`` says
    which file says what each does to lengths and blocks, and which what to entries.

    ``EVEN``: its trigger alone, equally many in all lanes. ``REST``: as even, and what is not kept
    goes to the row's rest, in fewer bits. The others are scored in one step, which
    answers with an array, and carried out in a later one. ``UNEVEN``: its scores, by layer or by
    head; the answer counts entries that are kept of each lane's scored region, ``[LG, E, R]``.
    ``BLOCKS``: as uneven, but whole blocks stay where they are; the answer ``[LG, E, R, K]`` names
    their columns, -1 behind the last. ``CODED``: as uneven, and what is kept becomes codes; the
    answer ``[LG, E, R, 2]`` counts entries kept, or coded in addition, and the vectors they need.
    ``PRUNED``: a prompt's own event is part of its forward, and how much each layer keeps follows
    from the prompt's length; later ones are uneven.
    """

    EVEN = "even"
    REST = "rest"
    UNEVEN = "uneven"
    BLOCKS = "blocks"
    CODED = "coded"
    PRUNED = "pruned"

    @property
    def is_even(self) -> bool:
        """Whether the trigger alone says how many stay, so that scoring and moving are one."""
        return self in (EventKind.EVEN, EventKind.REST)


@dataclass(frozen=True, slots=True)
class RowState:
    """What triggers may know of n rows; all ``[n]``.

    ``num_computed`` is logical, ``kv_len`` physical; ``first_uncompressed_pos`` is the logical
    position of the oldest token that no event has taken. ``block_size`` is the cache's.
    """

    num_prompt: IntArray
    num_computed: IntArray
    kv_len: IntArray
    first_uncompressed_pos: IntArray
    block_size: int = 1

    @classmethod
    def of(
        cls, num_prompt: int, num_computed: int, kv_len: int, uncompressed: int, block_size: int = 1
    ) -> RowState:
        """That of one row."""
        numbers = num_prompt, num_computed, kv_len, uncompressed
        prompt, computed, held, first = (np.array([number], np.int32) for number in numbers)
        return cls(prompt, computed, held, first, block_size)


@dataclass(frozen=True, slots=True)
class EvictionSpec:
    """One event per row; all ``[n]``.

    ``windows`` neighbouring windows of ``window_len`` entries each begin at physical entry
    ``region_start``; ``keep`` entries of each survive. ``query_start`` is the logical position of
    the first window's first query; further windows' queries lie ``window_len`` apart.
    ``num_queries`` is how many of them a window needs.
    """

    region_start: IntArray
    windows: IntArray
    window_len: IntArray
    keep: IntArray
    query_start: IntArray
    num_queries: IntArray
    first_uncompressed_pos: IntArray

    def part(self, at: IntArray | slice) -> EvictionSpec:
        """The events ``at`` alone."""
        return EvictionSpec(*(getattr(self, f.name)[at] for f in fields(EvictionSpec)))

    def is_within(self, kv_len: IntArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether each event takes only entries that rows of ``kv_len [n]`` entries hold."""
        kept = (self.keep >= 0) & (self.keep <= self.window_len) & (self.region_start >= 0)
        return np.asarray(kept & (self.region_start + self.windows * self.window_len <= kv_len))

    @property
    def evicted(self) -> IntArray:
        evicted: IntArray = self.windows * (self.window_len - self.keep)
        return evicted

    @property
    def num_scored_queries(self) -> IntArray:
        """Queries whose attention each event works out; 1 if there are none."""
        return np.asarray(np.maximum(self.windows * self.num_queries, 1))


class Trigger:
    """When events are due and what they take.

    By default events come exactly when they are due, after the last ``num_queries`` tokens, whose
    queries are logged for them.
    """

    num_queries: int
    """The most queries that a window must have; 0 if keys alone are scored."""
    # Nobody writes these: subclasses give them as fields, as constants or as properties.
    logs: bool = True
    """Whether queries are logged; else they are recomputed from the tokens in the event's task."""
    log_span: int = ONE_WINDOW
    """Windows whose queries are logged begin so many tokens apart, the first at ``log_from``."""
    log_stride: int = 1
    """Of every so many tokens from ``log_from`` on, the last one's queries are logged."""
    event_kind: ClassVar[EventKind | None] = None
    """The kind of its events, if no policy can have others."""
    intact: int = 0
    """Newest entries that every event leaves as they are, in their order."""
    counts_steps: ClassVar[bool] = False
    """The scheduler makes rows due, by its own steps (``EngineWide``)."""

    def prunes_prompt(self, num_prompt: int) -> bool:
        """Whether a prompt is computed in one step, fewer of its tokens from layer to layer
        (``Pruned``)."""
        return False

    def start(self, num_prompt: IntArray) -> IntArray:
        """``first_uncompressed_pos`` of a sequence that has computed nothing."""
        return np.zeros_like(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        """Logical positions of the next events, or ``NO_EVENT``."""
        raise NotImplementedError

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        """Logical positions from which queries are logged, or ``NOT_LOGGING``."""
        return last_queries(next_event, self.num_queries if self.logs else 0)

    def plan(self, rows: RowState) -> EvictionSpec:
        """The events of rows that are due."""
        raise NotImplementedError

    def next_turn(self, rows: RowState, num_prompt: IntArray) -> tuple[IntArray, IntArray]:
        """New ``num_prompt`` and ``first_uncompressed_pos`` of rows that continue a conversation;
        its next prompt ends at ``num_prompt [n]``.

        If neither changes, that prompt is treated as if it had been generated.
        """
        return rows.num_prompt, rows.first_uncompressed_pos

    def can_compress_early(self, rows: RowState) -> IntArray:
        """In which decoding rows an optional event would find something to evict: bool [n]."""
        return np.zeros(len(rows.num_prompt), bool)


@dataclass(frozen=True)
class Never(Trigger):
    """The trigger of a policy that never compacts."""

    num_queries: int = 0

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt

    def next_event(self, rows: RowState) -> IntArray:
        return np.full_like(rows.num_prompt, NO_EVENT)


def last_queries(next_event: IntArray, count: int) -> IntArray:
    """Log the ``count`` queries in front of the next event, if there is one."""
    if count == 0:
        return np.full_like(next_event, NOT_LOGGING)
    first = np.maximum(next_event - count, 0)
    return np.where(next_event == NO_EVENT, NOT_LOGGING, first).astype(np.int32)
