"""Which groups a scheduler has, and what makes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.blocks.cache_group import CacheGroup
from kvserve.scheduler.blocks.entry_group import EntryGroup
from kvserve.scheduler.blocks.token_group import LogGroup, TokenGroup
from kvserve.scheduler.layout import KVLayout


@dataclass(frozen=True)
class GroupSpec:
    """A group beside those that every engine has: ``block_tokens`` of its entries fit a block.

    By default it holds something of every token, in one table a row. A subclass may make another
    ``CacheGroup``; what is written is the device's matter (``engine/cache/row_groups.py``).
    """

    block_tokens: int

    def blocks_for(self, layout: KVLayout, num_tokens: int) -> int:
        """Most blocks of a sequence of ``num_tokens``, beside those of keys and values."""
        return 0

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        """The group of one scheduler."""
        assert self.block_tokens == layout.block_size, "prefixes bring whole columns"
        table = BlockTable(pool, (1, 1), max_rows, self.block_tokens, max_model_len)
        return TokenGroup(table)


def make_groups(
    pool: BlockPool,
    layout: KVLayout,
    max_rows: int,
    max_model_len: int,
    log_block_tokens: int,
    further: Iterable[GroupSpec] = (),
) -> tuple[CacheGroup, ...]:
    """The groups of one scheduler: keys and values, logged queries, and ``further`` ones."""
    lanes = layout.layer_groups, layout.rows
    kv, log = (
        BlockTable(pool, lanes, max_rows, tokens, max_model_len)
        for tokens in (layout.block_size, log_block_tokens)
    )
    made = pool, layout, max_rows, max_model_len
    entries = EntryGroup(kv, holds=layout.holds_entries)
    return entries, LogGroup(log), *(one.make(*made) for one in further)
