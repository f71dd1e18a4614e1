"""Which blocks and how many entries each row holds, in all cache groups (``cache_group.py``).

A row has two lengths: the logical position (``positions`` arguments) addresses the query log, the
physical length ``kv_lens`` addresses keys and values. ``rows`` arguments are arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, EntryGroup, LogGroup
from kvserve.scheduler.blocks.prefix_cache import PrefixCache
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import TableUpdate

if TYPE_CHECKING:
    from kvserve.scheduler.blocks.continuations import Continuations

G = TypeVar("G", bound=CacheGroup)

# +-----------------------------------------------------------------------------------------------+
# | Whose the blocks of a row are. Its table of keys and values, one lane, front to back:         |
# |                                                                                               |
# | 0               num_published       num_unmodified_tokens          kv_lens              end   |
# | |  shared prefix  |  own, unchanged  |  own, moved by an event  |  reserved  |                |
# |                                                                                               |
# | Shared prefix: the prefix cache, other rows or continuations name these blocks too. A block   |
# |   with more than one reference is read-only: who has to write there gets a private copy       |
# |   (``BlockTable.replace_shared``).                                                            |
# | Own: one reference. Full columns of unchanged entries are published, and are shared from then |
# |   on. What an event has moved never is.                                                       |
# | Reserved: named, but not counted: a new row's blocks up to its first event, a step's guesses. |
# |   ``give_back_unused`` returns them.                                                          |
# | Pending release: nothing. A block is free as soon as the host says so, also while the device  |
# |   still reads it: steps run in order there, so the next write comes later. The exception is   |
# |   what leaves for host memory, which is read after the step's events: these must not get such |
# |   blocks (``for_event``). Host blocks that a step reads are free once its moves are taken     |
# |   (``SwapMemory``).                                                                           |
# +-----------------------------------------------------------------------------------------------+


class BlockManager:
    """The groups of one pool. The first is that of keys and values, whose rows hold ``kv_lens [LG,
    max_rows, R]`` entries; the second that of logged queries."""

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        groups: tuple[CacheGroup, ...],
        continuations: Continuations,
        *,
        prefix_caching: bool,
    ) -> None:
        entries, log = groups[:2]
        assert isinstance(entries, EntryGroup) and isinstance(log, LogGroup)
        self.layout = layout
        self.pool = pool
        self.prefix_cache, self._prefix_caching = PrefixCache(pool), prefix_caching
        self.continuations = continuations
        self.groups = groups
        self.kv, self.kv_lens = entries.tables[0], entries.kv_lens
        self.log, self.queries = log.tables[0], log
        self._cached = [group for group in groups if group.cached_with_prefixes]
        self._column_ends = np.cumsum([group.tables[0].num_lanes for group in self._cached])
        tokens = math.lcm(layout.block_size, *(group.prefix_tokens for group in groups))
        self.prefix_columns = tokens // layout.block_size
        self.num_lanes = sum(table.num_lanes for group in groups for table in group.tables)
        """Tables of a row, of all groups."""

    def find(self, kind: type[G]) -> G | None:
        """The group of this kind, if there is one."""
        return next((group for group in self.groups if isinstance(group, kind)), None)

    def start_row(self, row: int) -> None:
        """Begin an empty row that logs no queries."""
        for group in self.groups:
            group.start_row(row)

    def missing_blocks(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        """Blocks still missing for ``new`` more tokens per row, from logical ``positions`` on."""
        return sum(group.missing_blocks(rows, new, positions) for group in self.groups)

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Allocate the blocks that ``missing_blocks`` counts."""
        for group in self.groups:
            group.grow(rows, new, positions)

    def blocks_alone(self, num_tokens: int, log_from: int, log_stride: int) -> int:
        """Blocks of a row that holds ``num_tokens`` and has logged one of ``log_stride`` queries
        from ``log_from`` on."""
        return sum(group.blocks_alone(num_tokens, log_from, log_stride) for group in self.groups)

    def pass_by(self, positions: IntArray) -> None:
        """Give back what no token from ``positions [n]`` of the first rows on needs."""
        for group in self.groups:
            group.pass_by(positions)

    def advance(self, rows: IntArray, new: IntArray) -> None:
        """Count ``new`` stored entries per row."""
        self.kv_lens[:, rows] += new[:, None]

    # ---- prefix cache ------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        """Blocks that are only held for later sequences; they are evicted when needed."""
        return self.continuations.num_evictable + self.prefix_cache.num_evictable

    @property
    def headroom(self) -> int:
        """Blocks that are free, or that eviction can free."""
        return self.pool.num_free + self.num_cached

    def have_free(self, count: int, *, for_event: bool = False) -> bool:
        """Whether ``count`` blocks are free; evicts what is held for later if needed: of prefix
        columns and continuations the least recently used first.

        Evicted continuations may move to host memory unless the blocks are for an event: events
        run before the step's swaps, and would write blocks whose contents are still to be moved.
        """
        if count <= self.pool.num_free:
            return True
        kept, prefixes = self.continuations, self.prefix_cache
        # Continuations are left alone if all that is held for later would not be enough.
        if kept.oldest is not None and count <= self.headroom:
            while count > self.pool.num_free and (oldest := kept.oldest) is not None:
                prefixes.evict(count - self.pool.num_free, before=oldest.used)
                if count > self.pool.num_free:
                    kept.evict_oldest(may_park=not for_event)
        if count > self.pool.num_free:
            prefixes.evict(count - self.pool.num_free)
        return count <= self.pool.num_free

    def forget(self, blocks: IntArray) -> None:
        """Drop whatever is held for later in ``blocks``, so that a row may write them."""
        self.continuations.forget(blocks)
        self.prefix_cache.forget(blocks)

    def clear_cached(self) -> None:
        """Drop all that is only held for later sequences."""
        self.continuations.clear()
        self.prefix_cache.clear()

    def match(self, hashes: list[bytes]) -> IntArray:
        """Columns ``[n, .]`` of the longest cached prefix that a row can begin with: all groups'
        blocks, side by side; 0 where it needs none."""
        columns = self.prefix_cache.match(hashes)
        columns = columns.reshape(len(columns), self._column_ends[-1])
        most = -1
        while len(columns) != most:  # what one group shortens, another may have to shorten again
            most = len(columns) // self.prefix_columns * self.prefix_columns
            columns = columns[:most]
            for group, part in self._by_group(columns):
                columns = columns[: len(group.usable(part[: len(columns)]))]
        usable = [group.usable(part) for group, part in self._by_group(columns)]
        return np.concatenate(usable, axis=1)

    def _by_group(self, columns: IntArray) -> Iterator[tuple[CacheGroup, IntArray]]:
        """Each group that prefixes bring, and its part of ``columns [n, .]``."""
        parts = np.split(columns, self._column_ends[:-1], axis=1)
        return zip(self._cached, parts, strict=True)

    def adopt(self, row: int, columns: IntArray) -> None:
        """Begin an empty row with the entries of shared ``columns [n, .]``."""
        for group, part in self._by_group(columns):
            group.adopt(row, part)
        tokens = len(columns) * self.layout.block_size
        for group in self.groups:
            if not group.cached_with_prefixes:
                group.begin_at(row, tokens)
        self.kv_lens[:, row] = tokens

    def publish(self, row: int, first: int, hashes: list[bytes]) -> None:
        """Cache a row's columns from ``first`` on, one per hash, for later prompts."""
        if self._prefix_caching:
            end = first + len(hashes)
            columns = [group.columns(row, first, end) for group in self._cached]
            self.prefix_cache.publish(hashes, np.concatenate(columns, axis=1))

    # ---- rows --------------------------------------------------------------------------------

    def release_row(self, row: int) -> None:
        """Give back everything a row holds."""
        for group in self.groups:
            group.release_row(row)

    def give_back_unused(self, rows: IntArray, computed: IntArray) -> None:
        """Give back blocks reserved for entries behind the last one held; rows have ``computed
        [n]`` tokens."""
        for group in self.groups:
            group.give_back_unused(rows, computed)

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        """Blocks that each of the first ``num_rows`` rows names, logged queries included."""
        return reduce(np.add, (group.blocks_of_rows(num_rows) for group in self.groups))

    def entries(self, rows: slice) -> IntArray:
        """Entries of keys and values that ``rows`` hold over the lanes of their tables: [n]."""
        held: IntArray = self.kv_lens[:, rows].sum(axis=(0, 2))
        return held + sum(group.held_beside(rows) for group in self.groups)

    def held_by_kind(self, rows: slice) -> Counter[str]:
        """Blocks that ``rows`` name, by what they hold (``CacheGroup.kind``)."""
        held: Counter[str] = Counter()
        for group in self.groups:
            held[group.kind] += int(group.blocks_of_rows(rows.stop)[rows].sum())
        return held

    def counts(self, rows: Rows) -> dict[str, int]:
        """What groups have to say of the entries of ``rows``, beside their number."""
        return {name: n for group in self.groups for name, n in group.counts(rows).items()}

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        for group in self.groups:
            group.swap(a, b)
        self.continuations.host.swap(a, b)

    def take_updates(self, num_rows: int) -> tuple[TableUpdate, ...]:
        """Entries of all tables set since the last call, for the first rows."""
        return tuple(update for group in self.groups for update in group.take_updates(num_rows))

    def check_integrity(self) -> None:
        """Reference counts equal the tables and the cache; lengths fit their columns."""
        self.continuations.check_integrity()
        rows = self.kv_lens.shape[1]
        tables = [table for group in self.groups for table in group.tables]
        named = [table.named_by_row(rows)[0] for table in tables]
        held = np.concatenate(
            [*named, self.prefix_cache.named_blocks(), self.continuations.named_blocks()]
        )
        assert (held > 0).all(), "a live table names the null block"
        self.pool.check_integrity(held)
        for group in self.groups:
            group.check_integrity()
