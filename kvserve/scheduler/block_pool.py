"""The pool's free blocks and reference counts, as numpy arrays: no Python object per block.

Tables, prefix columns and query logs hold one reference for each block they name; a block is free
when nobody does. Block 0 is the null block: padding reads and writes go there, it is never lent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]


def ragged_arange(counts: IntArray) -> IntArray:
    """``[0..counts[0]), [0..counts[1]), ...`` in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    places: IntArray = np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts)
    return places


class OutOfBlocksError(RuntimeError):
    """Raised by ``allocate``; callers check ``num_free`` first, so seeing it is a bug."""


class BlockPool:
    """Blocks 1..num_blocks-1 of the KV cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref: IntArray = np.zeros(num_blocks, np.int32)
        # A stack whose top is taken first: recently freed blocks are still in the CPU's caches.
        self._free: IntArray = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks - 1
        self._cached = np.zeros(num_blocks, bool)
        self.num_only_cached = 0
        """Blocks that nobody but the prefix cache names; kept up as references come and go."""

    @property
    def capacity(self) -> int:
        """Blocks that can be lent in all."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> IntArray:
        """Take ``count`` blocks, each with one reference."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        self.num_free -= count
        blocks = self._free[self.num_free : self.num_free + count].copy()
        self.ref[blocks] = 1
        return blocks

    def share(self, blocks: IntArray) -> None:
        """Add one reference to each block."""
        self.num_only_cached -= len(self._only_cached(blocks))
        np.add.at(self.ref, blocks, 1)

    def mark_cached(self, blocks: IntArray, cached: bool) -> None:
        """Say whether one reference of each block is the prefix cache's; before it is dropped."""
        if not cached:
            self.num_only_cached -= len(self._only_cached(blocks))
        self._cached[blocks] = cached
        if cached:
            self.num_only_cached += len(self._only_cached(blocks))

    def is_cached(self, blocks: IntArray) -> IntArray:
        """Which of the blocks the prefix cache names."""
        return np.asarray(self._cached[blocks])

    def _only_cached(self, blocks: IntArray) -> IntArray:
        alone: IntArray = np.unique(blocks[self._cached[blocks] & (self.ref[blocks] == 1)])
        return alone

    def release(self, blocks: IntArray) -> int:
        """Drop one reference to each block; return how many of them came free."""
        if not len(blocks):
            return 0
        np.subtract.at(self.ref, blocks, 1)
        self.num_only_cached += len(self._only_cached(blocks))
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
        alone = np.count_nonzero(self._cached & (self.ref == 1))
        assert alone == self.num_only_cached, "blocks that only the cache names were miscounted"
        assert self.num_free + np.count_nonzero(self.ref) == self.capacity, "a block leaked"
