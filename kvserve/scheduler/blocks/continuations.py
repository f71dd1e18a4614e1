"""Rows that outlive their sequence, so that the next turn of a conversation can resume from them.

A *continuation* names the blocks of a row and records the row's state. Any number of sequences may
resume from it, if their prompts begin with its tokens and they have the same policy; each gets
copies of the blocks that are not full. Continuations and prefix columns share one clock. An
evicted continuation moves to host memory, if there is room.
"""

from __future__ import annotations

from collections import OrderedDict, deque

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.continuation_index import ContinuationIndex
from kvserve.scheduler.blocks.swap_memory import SwapMemory
from kvserve.scheduler.messages.continuation import Continuation, Resumption
from kvserve.scheduler.messages.saved_row import NO_PLACE

_REMEMBERED = 256
"""How many evicted continuations are still known by their tokens."""


class Continuations:
    """Continuations in a pool, of at most ``max_blocks`` blocks (``None``: no limit), and in
    ``host`` memory; in either the least recently used is evicted first."""

    def __init__(
        self, pool: BlockPool, host: SwapMemory, block_size: int, max_blocks: int | None = None
    ) -> None:
        self.changes = 0
        """Grows whenever a look-up in the ``index`` may answer differently."""
        self._pool, self.host, self._block_size = pool, host, block_size
        self._max_blocks = pool.capacity if max_blocks is None else max_blocks
        self._refs: IntArray = np.zeros(pool.num_blocks, np.int32)
        self._here: OrderedDict[Continuation, None] = OrderedDict()
        self._hosted: OrderedDict[Continuation, None] = OrderedDict()
        self._num_host_refs = 0
        """References of those in host memory: to look at thousands of these takes 30 ms."""
        self.index = ContinuationIndex(block_size)
        self._gone: deque[Continuation] = deque()

    def __len__(self) -> int:
        """How many there are in the pool."""
        return len(self._here)

    def __contains__(self, known: Continuation) -> bool:
        """Whether ``known`` is still stored; after a failed step there may be another store."""
        return known in self._line(known)

    @property
    def num_hosted(self) -> int:
        return len(self._hosted)

    @property
    def all(self) -> list[Continuation]:
        """Those in the pool and in host memory, the least recently used of each first."""
        return [*self._here, *self._hosted]

    @property
    def num_blocks(self) -> int:
        """Blocks that continuations name."""
        return int(np.count_nonzero(self._refs))

    @property
    def num_evictable(self) -> int:
        """Blocks that only continuations name, or only continuations and the prefix cache."""
        return self._pool.count_idle(self._refs) if self._here else 0

    @property
    def oldest(self) -> Continuation | None:
        """The next to be evicted."""
        return next(iter(self._here), None)

    def add(self, new: Continuation) -> None:
        """Store a continuation while its row still holds its blocks."""
        assert new.row is not None
        if (known := self.index.same(new)) is not None:
            self.index.remove(known, here=known.row is not None)
            if known.row is None:
                self._gone.remove(known)
            else:
                self._release(known)
        self.index.add(new, here=True)
        self._pool.share(new.row.block_ids)
        np.add.at(self._refs, new.row.block_ids, 1)
        self.touch(new)
        while self._here and self.num_blocks > self._max_blocks:
            self.drop(next(iter(self._here)))

    def touch(self, known: Continuation) -> None:
        """Mark ``known`` as used now."""
        self.changes += 1
        self._pool.clock += 1
        known.used = self._pool.clock
        line = self._line(known)
        line[known] = None
        line.move_to_end(known)

    def take(self, found: Resumption) -> None:
        """Count a sequence that resumes from ``found``."""
        found.continuation.taken += 1
        if found.continuation in self:
            self.touch(found.continuation)

    def supersede(self, known: Continuation) -> None:
        """Make ``known`` the next to be evicted if only one sequence resumed it: that sequence has
        left a continuation of its own."""
        if known in self and known.taken == 1:
            known.used = 0
            self._line(known).move_to_end(known, last=False)

    def evict_oldest(self, *, may_park: bool) -> None:
        """Free the blocks of the oldest one: it moves to host memory, or is dropped."""
        known = next(iter(self._here))
        assert known.row is not None
        named = known.row.block_ids
        if not (may_park and known.used and self.have_host_blocks(len(named))):
            self.drop(known)
            return
        self._leave_pool(known, named)
        known.row, known.hosted = known.row.in_blocks(self.host.move_out(named)), True
        self._hosted[known] = None
        self._num_host_refs += len(named)

    def have_host_blocks(self, count: int) -> bool:
        """Whether ``count`` host blocks are free; drops continuations there if that makes them
        so."""
        pool = self.host.pool
        if count > pool.num_free + self._num_host_refs:
            return False
        while count > pool.num_free and self._hosted:
            self.drop(next(iter(self._hosted)))
        return count <= pool.num_free

    def drop(self, known: Continuation) -> None:
        """Release the blocks of ``known``; remember its tokens for a while."""
        self._release(known)
        self.index.remove(known, here=True)
        self.index.add(known, here=False)
        self._gone.append(known)
        if len(self._gone) > _REMEMBERED:
            self.index.remove(self._gone.popleft(), here=False)

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
            for known in list(self._here):
                if known.row is not None and wanted[known.row.block_ids].any():
                    self.drop(known)

    def clear(self) -> None:
        """Drop all continuations, and remember none."""
        for known in self.all:
            self._release(known)
        self.index = ContinuationIndex(self._block_size)
        self._gone.clear()

    def named_blocks(self, *, hosted: bool = False) -> IntArray:
        """Every block of the pool (or of host memory) that they name, once per reference."""
        line = self._hosted if hosted else self._here
        rows = [known.row.block_ids for known in line if known.row is not None]
        return np.concatenate([np.zeros(0, np.int32), *rows])

    def check_integrity(self) -> None:
        """Assert that the counted references are those of the stored continuations."""
        expected = np.bincount(self.named_blocks(), minlength=len(self._refs))
        assert np.array_equal(self._refs, expected), "continuations and their references differ"
        assert self._num_host_refs == len(self.named_blocks(hosted=True))
        assert set(self.index) == {*self.all, *self._gone}

    def _line(self, known: Continuation) -> OrderedDict[Continuation, None]:
        return self._hosted if known.hosted else self._here

    def _release(self, known: Continuation) -> None:
        assert known.row is not None
        named = known.row.block_ids
        if known.hosted:
            del self._hosted[known]
            self._num_host_refs -= len(named)
            self.host.pool.release(named)
        else:
            self._leave_pool(known, named)
        self.host.release_place(known.row.remainder)
        known.row, known.hosted = None, False
        self.changes += 1

    def _leave_pool(self, known: Continuation, named: IntArray) -> None:
        del self._here[known]
        np.subtract.at(self._refs, named, 1)
        self._pool.release(named)
        self.changes += 1
