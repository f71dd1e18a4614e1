"""What each block of the pool is held for, for display; the scheduler does not use it."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager

FREE, CACHED, LOGGED, OTHER, FIRST_ROW = range(5)
"""What a block is held for: nothing, later sequences alone, queries, another group; then rows."""


def block_owners(blocks: BlockManager, numbers: IntArray) -> IntArray:
    """What each block from 1 on is held for: ``FIRST_ROW + numbers[row]`` if a row holds keys and
    values in it. ``numbers [rows]``; a shared block counts for the last of its rows.
    """
    owners: IntArray = np.where(blocks.pool.ref > 0, CACHED, FREE).astype(np.int32)
    named, rows = blocks.kv.named_by_row(len(numbers))
    owners[named] = FIRST_ROW + numbers[rows]
    owners[blocks.log.named_by_row(len(numbers))[0]] = LOGGED
    for group in blocks.groups[2:]:
        for table in group.tables:
            owners[table.named_by_row(len(numbers))[0]] = OTHER
    return owners[1:]


def runs_of(labels: IntArray) -> IntArray:
    """``labels [n]`` as runs ``[m, 2]``: a label, and how often it comes in a row."""
    starts = np.flatnonzero(np.diff(labels, prepend=-1))
    lengths = np.diff(starts, append=len(labels))
    return np.stack([labels[starts], lengths], axis=1)
