"""Blocks kept for later sequences: prefix columns and continuations."""

from __future__ import annotations

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.continuations import Continuations
from kvserve.scheduler.blocks.prefix_cache import PrefixCache


class IdleBlocks:
    """Prefix cache and continuations; either may be off. The least recently used of both is evicted
    first when blocks run out."""

    def __init__(
        self, pool: BlockPool, prefixes: PrefixCache | None, continuations: Continuations | None
    ) -> None:
        self.prefixes = prefixes
        self.continuations = continuations
        self._pool = pool

    @property
    def num_blocks(self) -> int:
        """Blocks that only the prefix cache or continuations name."""
        kept = 0 if self.continuations is None else self.continuations.num_evictable
        return kept + (0 if self.prefixes is None else self.prefixes.num_evictable)

    def have_free(self, count: int, *, may_park: bool) -> bool:
        """Whether ``count`` blocks are free; evicts what is held for later if needed.

        Evicted continuations ``may_park`` in host memory unless the blocks are for an event: events
        run before the step's swaps, and would write blocks whose contents are still to be moved.
        """
        if count > self._pool.num_free and self.continuations is not None:
            self._evict_by_use(self.continuations, count, may_park)
        missing = count - self._pool.num_free
        if missing > 0 and self.prefixes is not None:
            self.prefixes.evict(missing)
        return count <= self._pool.num_free

    def forget(self, blocks: IntArray) -> None:
        """Drop whatever names ``blocks``, so that a row may write them."""
        if self.continuations is not None:
            self.continuations.forget(blocks)
        if self.prefixes is not None:
            self.prefixes.forget(blocks)

    def clear(self) -> None:
        """Drop everything."""
        if self.continuations is not None:
            self.continuations.clear()
        if self.prefixes is not None:
            self.prefixes.clear()

    def _evict_by_use(self, continuations: Continuations, count: int, may_park: bool) -> None:
        """Evict continuations, and columns used before them, until ``count`` blocks are free or
        only newer columns are left. Evict nothing if eviction cannot free enough."""
        if count > self._pool.num_free + self.num_blocks:
            return
        while count > self._pool.num_free and (oldest := continuations.oldest) is not None:
            if self.prefixes is not None:
                self.prefixes.evict(count - self._pool.num_free, before=oldest.used)
            if count > self._pool.num_free:
                continuations.evict_oldest(may_park=may_park)
