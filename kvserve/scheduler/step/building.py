"""What a scheduler is made of, from its settings."""

from __future__ import annotations

from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.group_spec import make_groups
from kvserve.scheduler.blocks.idle_blocks import IdleBlocks
from kvserve.scheduler.blocks.prefix_cache import PrefixCache
from kvserve.scheduler.blocks.remainder_places import RemainderPlaces, num_places
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.offload.continuations import Continuations
from kvserve.scheduler.offload.hosted_rows import HostedRows
from kvserve.scheduler.step.settings import SchedulerSettings


def make_host_memory(settings: SchedulerSettings) -> HostedRows:
    """What rows that are away have: host blocks, and places for their remainders."""
    rows = settings.max_num_seqs
    places = RemainderPlaces(rows, num_places(rows, continuations=settings.continuations))
    return HostedRows(BlockPool(settings.num_host_blocks + 1), places)


def make_cache(
    layout: KVLayout, pool: BlockPool, settings: SchedulerSettings, hosted: HostedRows
) -> tuple[BlockManager, Continuations | None]:
    """The blocks of all groups, and the store of continuations if these are on."""
    rows, longest = settings.max_num_seqs, settings.max_model_len
    logged, further = settings.log_block_tokens, settings.further_groups
    groups = make_groups(pool, layout, rows, longest, logged, further)
    store = None
    if settings.continuations:
        store = Continuations(pool, hosted, settings.max_continuation_blocks)
    idle = IdleBlocks(pool, PrefixCache(pool) if settings.prefix_caching else None, store)
    return BlockManager(layout, pool, rows, groups, idle, hosted.remainders), store
