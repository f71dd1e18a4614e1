"""The pool's free blocks and reference counts, as numpy arrays: no Python object per block.

Tables, query logs, prefix columns and continuations hold one reference for each block they name; a
block without references is free. Block 0 is the null block: padding reads and writes go there, and
it is never allocated.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray


class BlockPool:
    """Blocks 1..num_blocks-1 of the KV cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref: IntArray = np.zeros(num_blocks, np.int32)
        # A stack whose top is taken first: recently freed blocks are still in the CPU's caches.
        self._free: IntArray = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks - 1
        self._column_of: IntArray = np.full(num_blocks, -1, np.int32)
        self.clock = 0
        """Counts uses of prefix columns and continuations, which are evicted by their last use."""
        self.only_cached: IntArray = np.zeros(0, np.int32)
        """For each column of the prefix cache, the number of blocks that only the cache names.

        Updated as references come and go, so that no search through the pool is needed.
        """
        self.num_only_cached = 0

    @property
    def capacity(self) -> int:
        """Blocks that can be allocated in all."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> IntArray:
        """Take ``count`` blocks, each with one reference; callers check ``num_free`` first."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} free")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count].copy()
        self.ref[blocks] = 1
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Add one reference to each block."""
        self._count_only_cached(blocks, -1)
        np.add.at(self.ref, blocks, 1)

    def cache_columns(self, blocks: IntArray, columns: list[int]) -> None:
        """Add references to the distinct ``blocks [n, .]`` as n columns of the prefix cache; block
        0 is none."""
        most = max(columns)
        if most >= len(self.only_cached):
            more = np.zeros(max(most + 1, 64), np.int32)
            self.only_cached = np.concatenate([self.only_cached, more])
        there = blocks > 0
        named = blocks[there]
        self.share(named)
        self._column_of[named] = np.broadcast_to(np.asarray(columns)[:, None], blocks.shape)[there]
        self._count_only_cached(named, 1)

    def release_columns(self, blocks: IntArray) -> None:
        """Drop the prefix cache's references to ``blocks``, which are all those of some columns."""
        blocks = blocks[blocks > 0]
        self._count_only_cached(blocks, -1)
        self._column_of[blocks] = -1
        self.release(blocks)

    def columns_of(self, blocks: IntArray) -> set[int]:
        """The columns of the prefix cache that name any of the blocks."""
        return set(self._column_of[blocks].tolist()) - {-1}

    def count_idle(self, kept: IntArray) -> int:
        """Blocks with no references but ``kept [num_blocks]`` and the prefix cache's."""
        named: IntArray = np.flatnonzero(kept)
        others = kept[named] + (self._column_of[named] >= 0)
        return int(np.count_nonzero(self.ref[named] == others))

    def _count_only_cached(self, blocks: IntArray, sign: int) -> None:
        """Add ``sign`` for each of the blocks whose only reference is the cache's."""
        if len(self.only_cached):
            alone = np.unique(blocks[(self._column_of[blocks] >= 0) & (self.ref[blocks] == 1)])
            np.add.at(self.only_cached, self._column_of[alone], sign)
            self.num_only_cached += sign * len(alone)

    def release(self, blocks: IntArray) -> int:
        """Drop one reference to each block; return how many of them came free."""
        if not len(blocks):
            return 0
        np.subtract.at(self.ref, blocks, 1)
        self._count_only_cached(blocks, 1)
        freed = np.unique(blocks[self.ref[blocks] == 0])
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)
        return len(freed)

    def check_integrity(self, held: IntArray) -> None:
        """``held`` names every block of every table and log, once per reference."""
        expected = np.bincount(held, minlength=self.num_blocks)
        expected[0] = 0
        assert np.array_equal(self.ref, expected), "reference counts differ from the tables"
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a block is free twice"
        assert not self.ref[free].any(), "a free block is referenced"
        alone = self._column_of[(self._column_of >= 0) & (self.ref == 1)]
        counted = np.bincount(alone, minlength=len(self.only_cached))
        assert np.array_equal(counted, self.only_cached), "blocks that only the cache names"
        assert self.num_only_cached == len(alone)
        assert self.num_free + np.count_nonzero(self.ref) == self.capacity, "a block leaked"
