"""The prefix cache against a plain list of columns, by last use."""

from __future__ import annotations

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.prefix_cache import PrefixCache


class PlainCache:
    """Columns by hash, the least recently used first."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.columns: dict[bytes, IntArray] = {}

    def touch(self, hashes: list[bytes]) -> None:
        for digest in reversed(hashes):  # parents after their children
            self.columns[digest] = self.columns.pop(digest)

    def alone(self, digest: bytes) -> int:
        return int((self.pool.ref[self.columns[digest]] == 1).sum())

    def evict(self, count: int) -> None:
        for digest in list(self.columns):
            if count <= 0:
                break
            count -= self.alone(digest)
            if self.alone(digest):
                del self.columns[digest]


@pytest.mark.parametrize("size", [1, 6, 64])
@pytest.mark.parametrize("seed", range(8))
def test_the_least_recently_used_go_first(size: int, seed: int) -> None:
    rng, most = np.random.default_rng(seed), 24
    pool = BlockPool(size * most * 2 + 1)
    cache, plain = PrefixCache(pool), PlainCache(pool)
    prompts = [[b"%d-%d" % (p, c) for c in range(rng.integers(1, 6))] for p in range(12)]
    running: list[IntArray] = []
    for _ in range(150):
        hashes = prompts[rng.integers(len(prompts))]
        if rng.random() < 0.5 and len(running) < 4:
            found = cache.match(hashes)
            hits = [digest for digest in hashes if digest in plain.columns]
            hits = hits[: next((i for i, d in enumerate(hashes) if d not in plain.columns), 99)]
            assert found.tolist() == [plain.columns[d].tolist() for d in hits]
            plain.touch(hits)
            pool.share(found.ravel())  # what is hit is not evicted
            missing = (len(hashes) - len(found)) * size
            short = missing - pool.num_free
            if short > 0:
                plain.evict(short)  # first: it looks at references
                cache.evict(short)
            fresh = pool.allocate(missing).reshape(-1, size)
            columns = np.concatenate([found.reshape(-1, size), fresh])
            cache.publish(hashes, columns)
            for digest, column in zip(hashes, columns, strict=True):
                plain.columns.setdefault(digest, column)
            plain.touch(hashes)
            running.append(columns)
        elif running:
            row = running.pop(rng.integers(len(running)))
            if rng.random() < 0.3:  # one of its blocks has got a private copy
                cache.forget(row[0, :1])
                plain.columns = {d: c for d, c in plain.columns.items() if row[0, 0] not in c}
            pool.release(row.ravel())
        if rng.random() < 0.2:
            count = int(rng.integers(1, 3 * size))
            plain.evict(count)
            cache.evict(count)
        assert cache.columns.keys() == plain.columns.keys()
        assert cache.num_evictable == sum(map(plain.alone, plain.columns))
        pool.check_integrity(np.concatenate([cache.named_blocks(), *(r.ravel() for r in running)]))
    cache.clear()
    assert cache.num_evictable == 0 and not cache.columns
