"""The prefix cache: block columns by the hash of all tokens up to their end.

A *column* is block j of all KV groups. It is found by the chained hash of tokens [0, (j+1)B), so a
hit is always a whole prefix. The cache holds one reference per block. When blocks run out, columns
with blocks that only the cache names are evicted, least recently used first.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool


class PrefixCache:
    """Maps hashes to block columns, which have places in two arrays.

    ``_blocks [places, W]``, the blocks of all groups side by side, and ``_used [places]``, which
    orders columns by their last use (0: the place is empty). The work of a step grows with columns,
    not with blocks: with tables per layer and head a column has hundreds of blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._places: dict[bytes, int] = {}
        self._digests: list[bytes] = []
        self._empty: list[int] = []
        self._blocks: IntArray = np.zeros((0, 1), np.int32)
        self._used: IntArray = np.zeros(0, np.int64)

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache names."""
        return self.pool.num_only_cached

    @property
    def columns(self) -> dict[bytes, IntArray]:
        """Every cached column ``[W]`` by its hash."""
        return {digest: self._blocks[place].copy() for digest, place in self._places.items()}

    def match(self, hashes: list[bytes]) -> IntArray:
        """Columns ``[n, W]`` of the longest cached prefix, marked as used."""
        found = []
        for digest in hashes:
            place = self._places.get(digest)
            if place is None:
                break
            found.append(place)
        self._touch(found)
        columns: IntArray = self._blocks[np.array(found, np.int64)]
        return columns

    def publish(self, hashes: list[bytes], columns: IntArray) -> None:
        """Cache ``columns [n, W]`` under their hashes; those already there stay as they are."""
        if not len(self._used):
            self._blocks = np.zeros((0, columns.shape[1]), np.int32)
        new = [i for i, digest in enumerate(hashes) if digest not in self._places]
        if new:
            self._add([hashes[i] for i in new], columns[new])
        self._touch([self._places[digest] for digest in hashes])

    def evict(self, count: int, before: int | None = None) -> None:
        """Free at least ``count`` blocks, or all that only the cache names.

        With ``before``, evict only columns whose last use was before that.
        """
        alone = self.pool.only_cached
        places = np.flatnonzero(alone)
        if before is not None:
            places = places[self._used[places] < before]
        if count < len(places):  # each of these frees a block
            places = places[self._used[places].argpartition(count - 1)[:count]]
        places = places[self._used[places].argsort()]
        enough = int(np.searchsorted(alone[places].cumsum(), count)) + 1
        self._drop(places[:enough].tolist())

    def forget(self, blocks: IntArray) -> None:
        """Drop the columns that hold any of ``blocks``, so that their owner may write them."""
        self._drop(list(self.pool.columns_of(blocks)))

    def clear(self) -> None:
        """Drop every column."""
        self._drop(list(self._places.values()))

    def named_blocks(self) -> IntArray:
        """Every block the cache names, once per reference."""
        held: IntArray = self._blocks[self._used > 0]
        return held[held > 0]

    def _add(self, digests: list[bytes], blocks: IntArray) -> None:
        while len(self._empty) < len(digests):
            self._grow()
        places = [self._empty.pop() for _ in digests]
        self._places.update(zip(digests, places, strict=True))
        for digest, place in zip(digests, places, strict=True):
            self._digests[place] = digest
        self._blocks[places] = blocks
        self.pool.cache_columns(blocks, places)

    def _grow(self) -> None:
        old, more = len(self._used), max(64, len(self._used))
        self._blocks = np.concatenate(
            [self._blocks, np.zeros((more, self._blocks.shape[1]), np.int32)]
        )
        self._used = np.concatenate([self._used, np.zeros(more, np.int64)])
        self._digests += [b""] * more
        self._empty += range(old + more - 1, old - 1, -1)

    def _touch(self, places: list[int]) -> None:
        """Mark a prefix as used; parents count as newer, since children are no hit without them."""
        self.pool.clock += len(places)
        self._used[places] = self.pool.clock - np.arange(len(places))

    def _drop(self, places: list[int]) -> None:
        if not places:
            return
        for place in places:
            del self._places[self._digests[place]]
        self._used[places] = 0
        self._empty += places
        self.pool.release_columns(self._blocks[places].ravel())
