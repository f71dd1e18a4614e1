"""Compression events: their kinds, and what is known of them from due to applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.trigger import EventKind, EvictionSpec


@dataclass(frozen=True, slots=True)
class CodeBlocks:
    """Where E events write codes, and what rows hold before and after; ``[LG, E, R]``.

    ``index_blocks`` and ``vector_blocks`` ``[LG, E, R, .]`` are those of each lane from its first
    column on.
    """

    coded_before: IntArray
    coded: IntArray
    vectors_before: IntArray
    num_vectors: IntArray
    index_blocks: IntArray
    vector_blocks: IntArray

    def part(self, at: IntArray | slice) -> CodeBlocks:
        """The events ``at`` alone."""
        return CodeBlocks(*(getattr(self, name)[:, at] for name in self.__slots__))


class RestBlocks(NamedTuple):
    """Where E events write what they do not keep: behind the ``before [E]`` entries of a row's
    rest, in ``blocks [E, W]`` of its columns from that entry's on."""

    before: IntArray
    blocks: IntArray


_later: Callable[[], Any] = np.zeros(0, np.int32).copy
"""What a field holds that an earlier stage leaves empty."""
_BY_EVENT = (
    "rows",
    "seq_ids",
    "token_ids",
    "copy_start",
    "released",
    "log_from",
    "rounded_at",
    "choices",
)
_BY_LANE = "old_lens", "new_lens", "dst_blocks"


@dataclass(frozen=True, slots=True)
class Events:
    """E events of one policy and one ``kind``; arrays are ``[E]``. Each stage fills in more.

    *Due*: ``plan`` says what is taken of ``rows`` (numbers before ``SchedulerOutput.row_swaps``),
    ``old_lens [LG, E, R]`` what they hold. If queries are recomputed, ``token_ids [E, T]`` are the
    tokens from ``plan.query_start`` on, padded at the end.

    *Known*: they leave ``new_lens [LG, E, R]`` entries; ``choices``: what the handler has read from
    their scores.

    *Scheduled*: ``released`` blocks came free. Entries from ``copy_start`` on are written again:
    ``dst_blocks[lg, e, r, j]`` is the block of column ``copy_start[e] // B + j`` afterwards. Then
    queries are logged from ``log_from`` on, and tokens before ``rounded_at`` are no longer read as
    they were computed. Those of kind ``CODED`` write ``codes``, and raw
    entries if a row is written afresh. ``early`` events were not due, but blocks ran out.
    """

    policy_id: int
    kind: EventKind
    rows: IntArray
    seq_ids: IntArray
    plan: EvictionSpec
    old_lens: IntArray
    token_ids: IntArray | None = None
    new_lens: IntArray = field(default_factory=_later)
    copy_start: IntArray = field(default_factory=_later)
    dst_blocks: IntArray = field(default_factory=_later)
    log_from: IntArray = field(default_factory=_later)
    released: IntArray = field(default_factory=_later)
    codes: CodeBlocks | None = None
    rest: RestBlocks | None = None
    rounded_at: IntArray = field(default_factory=_later)
    early: bool = False
    choices: np.ndarray[Any, np.dtype[np.object_]] = field(default_factory=_later)

    @property
    def lengths_known(self) -> bool:
        """Whether it is known what they leave."""
        return len(self.new_lens) > 0

    @property
    def compacts(self) -> IntArray:
        """Which events evict entries, or turn some into codes: bool [E]."""
        changed = (self.new_lens != self.old_lens).any(axis=(0, 2))
        if self.codes is not None:
            changed |= (self.codes.coded != self.codes.coded_before).any(axis=(0, 2))
        return np.asarray(changed)

    @property
    def dropped(self) -> IntArray:
        """Entries that leave the cache, over the lanes of a row's tables: [E]. A rest stays."""
        left = (self.old_lens - self.new_lens).sum(axis=(0, 2))
        return np.asarray(left if self.rest is None else np.zeros_like(left))

    @property
    def scores_alone(self) -> IntArray:
        """Which events keep all that they score, where it is: bool [E]."""
        return np.asarray((self.plan.evicted == 0) & (self.kind is EventKind.EVEN))

    @property
    def rounds(self) -> IntArray:
        """Behind which events no older entry is read as it was computed: bool [E]. Those that evict
        nothing change nothing; a pruned prompt was never stored so."""
        return np.asarray(self.compacts | (self.kind is EventKind.PRUNED))

    def part(self, at: IntArray | slice) -> Events:
        """The events ``at`` alone."""
        some: dict[str, Any] = {"plan": self.plan.part(at)}
        for name in (*_BY_EVENT, *_BY_LANE):
            array = getattr(self, name)
            if array is not None and len(array):
                some[name] = array[:, at] if name in _BY_LANE else array[at]
        if self.codes is not None:
            some["codes"] = self.codes.part(at)
        if self.rest is not None:
            some["rest"] = RestBlocks(*(array[at] for array in self.rest))
        return replace(self, **some)
