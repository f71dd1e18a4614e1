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
        np.add.at(self.ref, blocks, 1)

    def release(self, blocks: IntArray) -> int:
        """Drop one reference to each block; return how many of them came free."""
        if not len(blocks):
            return 0
        np.subtract.at(self.ref, blocks, 1)
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
        assert self.num_free + np.count_nonzero(self.ref) == self.capacity, "a block leaked"
