"""Rows that outlive their sequence, so that the next turn of a conversation can resume from them.

A *continuation* names the blocks of a row and records the row's state. Any number of sequences may
resume from it, if their prompts begin with its tokens and they have the same policy; each gets
copies of the blocks that are not full. Continuations and prefix columns share one clock. An
evicted continuation moves to host memory, if there is room.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.continuation_index import ContinuationIndex, LookedUp
from kvserve.scheduler.blocks.swap_memory import SwapMemory
from kvserve.scheduler.messages.continuation import (
    NO_PLACE,
    Continuation,
    Resumption,
    named_by,
)

_REMEMBERED = 256
"""How many evicted continuations are still known by their tokens."""


class Continuations:
    """Continuations over one pool; the least recently used is evicted first. Together they name at
    most ``max_blocks`` blocks (``None``: no limit)."""

    def __init__(self, pool: BlockPool, host: SwapMemory, max_blocks: int | None = None) -> None:
        self.hits = 0
        self.misses: Counter[str] = Counter()
        self.hits_from_host = 0
        self.resumed_tokens = 0
        self.changes = 0
        """Grows whenever ``find`` may answer differently."""
        self.host = host
        self.host.on_drop = self._remember
        self._pool = pool
        self._max_blocks = pool.capacity if max_blocks is None else max_blocks
        self._refs: IntArray = np.zeros(pool.num_blocks, np.int32)
        self._by_use: OrderedDict[int, Continuation] = OrderedDict()
        self._index = ContinuationIndex()
        self._gone: deque[Continuation] = deque()

    def __len__(self) -> int:
        return len(self._by_use)

    def __contains__(self, known: Continuation) -> bool:
        """Whether ``known`` is still stored; after a failed step there may be another store."""
        return known in self.host or self._by_use.get(id(known)) is known

    @property
    def all(self) -> list[Continuation]:
        """Those in the pool and in host memory, the least recently used of each first."""
        return [*self._by_use.values(), *self.host.all]

    @property
    def num_blocks(self) -> int:
        """Blocks that continuations name."""
        return int(np.count_nonzero(self._refs))

    @property
    def num_evictable(self) -> int:
        """Blocks that only continuations name, or only continuations and the prefix cache."""
        return self._pool.count_idle(self._refs) if self._by_use else 0

    @property
    def oldest(self) -> Continuation | None:
        """The next to be evicted."""
        return next(iter(self._by_use.values()), None)

    def find(self, token_ids: IntArray, keys: Iterable[bytes], shared_by: Hashable) -> LookedUp:
        """The longest continuations that these tokens begin with.

        ``keys`` are the seed and the column hashes of ``token_ids``. The last token is always left
        to be computed.
        """
        return self._index.longest(token_ids, keys, shared_by)

    def add(self, new: Continuation) -> None:
        """Store a continuation while its row still holds its blocks."""
        assert new.row is not None
        if (known := self._index.same(new)) is not None:
            self._forget(known)
        self._index.add(new, here=True)
        self._pool.share(new.row.named)
        np.add.at(self._refs, new.row.named, 1)
        self.touch(new)
        while self._by_use and self.num_blocks > self._max_blocks:
            self.drop(next(iter(self._by_use.values())))

    def touch(self, known: Continuation) -> None:
        """Mark ``known`` as used now."""
        self.changes += 1
        self._pool.clock += 1
        known.used = self._pool.clock
        if known.hosted:
            self.host.touch(known)
            return
        self._by_use[id(known)] = known
        self._by_use.move_to_end(id(known))

    def take(self, found: Resumption) -> None:
        """Count a sequence that resumes from ``found``."""
        self.hits += 1
        self.resumed_tokens += found.num_tokens
        found.continuation.taken += 1
        if found.continuation in self:
            self.touch(found.continuation)

    def supersede(self, known: Continuation) -> None:
        """Make ``known`` the next to be evicted if only one sequence resumed it: that sequence has
        left a continuation of its own."""
        if known in self and known.taken == 1:
            known.used = 0
            if known.hosted:
                self.host.send_first(known)
            else:
                self._by_use.move_to_end(id(known), last=False)

    def evict_oldest(self, *, may_park: bool) -> None:
        """Free the blocks of the oldest one: it moves to host memory, or is dropped."""
        known = next(iter(self._by_use.values()))
        device = self.host.park(known) if may_park and known.used else None
        if device is None:
            self.drop(known)
        else:
            self._free(known, device)

    def drop(self, known: Continuation) -> None:
        """Release the blocks of ``known``; remember its tokens for a while."""
        self._release(known)
        self._remember(known)

    def make_place(self) -> bool:
        """Whether there is a place for a remainder; drops the continuation that used one least
        recently if that makes it so."""
        for known in self.all:
            if self.host.have_place(preempted=False):
                break
            if known.row is not None and known.row.remainder != NO_PLACE:
                self.drop(known)
        return self.host.have_place(preempted=False)

    def forget(self, blocks: IntArray) -> None:
        """Drop continuations that name any of ``blocks``, so that a row may write these."""
        wanted = np.zeros(len(self._refs), bool)
        wanted[blocks] = True
        if (self._refs[wanted] > 0).any():
            for known in list(self._by_use.values()):
                if known.row is not None and wanted[known.row.named].any():
                    self.drop(known)

    def clear(self) -> None:
        """Drop all continuations, and remember none."""
        for known in self.all:
            self._release(known)
        self._index = ContinuationIndex()
        self._gone.clear()

    def count_from(self, other: Continuations) -> None:
        """Take over the counts of ``other``."""
        self.hits, self.misses = other.hits, other.misses
        self.hits_from_host = other.hits_from_host
        self.resumed_tokens = other.resumed_tokens

    def held(self) -> IntArray:
        """Every block that continuations name, once per reference."""
        return named_by(self._by_use.values())

    def check_integrity(self) -> None:
        """Assert that the counted references are those of the stored continuations."""
        expected = np.bincount(self.held(), minlength=len(self._refs))
        assert np.array_equal(self._refs, expected), "continuations and their references differ"
        listed = {id(known) for known in self._index}
        assert listed == {*self._by_use, *map(id, (*self._gone, *self.host.all))}

    def _forget(self, known: Continuation) -> None:
        self._index.remove(known, here=known.row is not None)
        if known.row is None:
            self._gone.remove(known)
        else:
            self._release(known)

    def _release(self, known: Continuation) -> None:
        if known.hosted:
            self.host.release(known)
            self.changes += 1
            return
        assert known.row is not None
        self.host.release_place(known.row.remainder)
        named, known.row = known.row.named, None
        self._free(known, named)

    def _free(self, known: Continuation, named: IntArray) -> None:
        del self._by_use[id(known)]
        np.subtract.at(self._refs, named, 1)
        self._pool.release(named)
        self.changes += 1

    def _remember(self, known: Continuation) -> None:
        self.changes += 1
        self._index.remove(known, here=True)
        self._index.add(known, here=False)
        self._gone.append(known)
        if len(self._gone) > _REMEMBERED:
            self._index.remove(self._gone.popleft(), here=False)
