"""Prompt blocks that outlive their sequence: block columns by the hash of all tokens up to them.

A *column* is block j of all KV groups. It is found by the chained hash of tokens [0, (j+1)B), so a
hit is always a whole prefix. The cache holds one reference per block; a column whose blocks nobody
else names is the first thing to go when blocks run out, least recently used first.
"""

from __future__ import annotations

import hashlib

import numpy as np

from kvserve.scheduler.block_pool import BlockPool, IntArray

_SEED = b"kvserve"


def column_hashes(token_ids: IntArray, block_size: int, known: list[bytes]) -> list[bytes]:
    """Chained hashes of all full columns; ``known`` are those of the first ones."""
    hashes = list(known)
    tokens = np.ascontiguousarray(token_ids, np.int32)
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else _SEED
        digest = hashlib.blake2b(parent, digest_size=16)
        digest.update(tokens[start : start + block_size].tobytes())
        hashes.append(digest.digest())
    return hashes


class PrefixCache:
    """Hash to block column; ``_used`` orders blocks by their last use."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._columns: dict[bytes, IntArray] = {}
        self._hash_of = np.zeros(pool.num_blocks, object)
        self._cached = np.zeros(pool.num_blocks, bool)
        self._used: IntArray = np.zeros(pool.num_blocks, np.int64)
        self._clock = 0

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache names."""
        return int(np.count_nonzero(self._cached & (self.pool.ref == 1)))

    def match(self, hashes: list[bytes]) -> list[IntArray]:
        """Columns ``[LG, R]`` of the longest cached prefix, marked as used."""
        found = []
        for digest in hashes:
            column = self._columns.get(digest)
            if column is None:
                break
            found.append(column)
        self._touch(found)
        return found

    def publish(self, hashes: list[bytes], columns: IntArray) -> None:
        """Cache ``columns [n, LG, R]`` under their hashes; those already there stay as they are."""
        for digest, column in zip(hashes, columns, strict=True):
            if digest not in self._columns:
                blocks = column.copy()
                self.pool.share(blocks.ravel())
                self._columns[digest] = blocks
                self._cached[blocks] = True
                self._hash_of[blocks] = digest
        self._touch([self._columns[digest] for digest in hashes])

    def evict(self, count: int) -> None:
        """Free at least ``count`` blocks, or all that only the cache names."""
        unused = np.flatnonzero(self._cached & (self.pool.ref == 1))
        if count < len(unused):
            unused = unused[self._used[unused].argpartition(count - 1)[:count]]
        for digest in set(self._hash_of[unused]):
            self._drop(digest)

    def forget(self, blocks: IntArray) -> None:
        """Drop the columns that hold any of ``blocks``, so that their owner may write them."""
        for digest in set(self._hash_of[blocks[self._cached[blocks]]]):
            self._drop(digest)

    def clear(self) -> None:
        """Drop every column."""
        for digest in list(self._columns):
            self._drop(digest)

    def held(self) -> IntArray:
        """Every block the cache names, once per reference."""
        parts = [column.ravel() for column in self._columns.values()]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def _touch(self, columns: list[IntArray]) -> None:
        """Mark a prefix as used; parents after their children, who could not be hit without."""
        self._clock += len(columns)
        for age, column in enumerate(columns):
            self._used[column] = self._clock - age

    def _drop(self, digest: bytes) -> None:
        blocks = self._columns.pop(digest).ravel()
        self._cached[blocks] = False
        self.pool.release(blocks)
