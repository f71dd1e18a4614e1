"""Slots, stores, gathers and compaction against plain indexing, in every granularity."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.move_kv import compact_kv_torch, gather_keys, gather_queries
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.kernels.store_kv import store_kv, store_queries
from kvserve.scheduler.layout import Granularity, KVLayout

BLOCKS, ROWS, COLUMNS = 400, 3, 4


def layout_of(granularity: Granularity) -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, granularity=granularity)


def random_tables(layout: KVLayout) -> torch.Tensor:
    shape = (layout.layer_groups, ROWS, layout.rows, COLUMNS)
    blocks = torch.randperm(BLOCKS - 1)[: layout.groups * ROWS * COLUMNS] + 1
    return blocks.to(torch.int32).view(shape)


def entry(cache: torch.Tensor, layout: KVLayout, tables: torch.Tensor, *at: int) -> torch.Tensor:
    """[2, D]: key and value of (layer, kv head, row, position), by plain indexing."""
    layer, head, row, position = at
    group, place = divmod(layer, layout.layers_per_block)
    table, lane = divmod(head, layout.heads_per_block)
    block = tables[group, row, table, position // layout.block_size]
    return cache[block, place, :, position % layout.block_size, lane]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_store_gather_and_compact(granularity: Granularity) -> None:
    layout = layout_of(granularity)
    tables = random_tables(layout)
    cache = torch.full(layout.cache_shape(BLOCKS), float("nan"))
    rows = torch.tensor([2, 2, 0, 1, 2])
    positions = torch.tensor([0, 1, 7, 15, 2])
    lanes = positions.expand(layout.layer_groups, layout.rows, -1)
    slots = slot_mapping(tables, rows, lanes, layout.block_size)
    stored = torch.randn(layout.num_layers, 2, len(rows), layout.num_kv_heads, layout.head_dim)
    for layer in range(layout.num_layers):
        group, place = divmod(layer, layout.layers_per_block)
        store_kv(cache, place, slots[group], stored[layer, 0], stored[layer, 1])
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            for t, (row, position) in enumerate(zip(rows, positions, strict=True)):
                got = entry(cache, layout, tables, layer, head, int(row), int(position))
                assert torch.equal(got, stored[layer, :, t, head])
    all_lanes = positions.expand(layout.num_layers, layout.num_kv_heads, -1)
    all_slots = slot_mapping(tables, rows, all_lanes, layout.block_size)
    assert torch.equal(gather_keys(cache, all_slots), stored[:, 0].transpose(1, 2))

    # Each lane swaps its own two entries of row 2: the reference reads all before it writes any.
    pair = torch.randint(0, 2, (layout.num_layers, layout.num_kv_heads, 1))
    pair = torch.cat([pair, 1 - pair], dim=-1)
    src = slot_mapping(tables, torch.tensor([2, 2]), pair, layout.block_size)
    dst_positions = torch.tensor([0, 1]).expand(*pair.shape[:2], -1)
    dst = slot_mapping(tables, torch.tensor([2, 2]), dst_positions, layout.block_size)
    before = cache.clone()
    compact_kv_torch(cache, src, dst)
    for layer in range(layout.num_layers):
        for head in range(layout.num_kv_heads):
            for place in range(2):
                got = entry(cache, layout, tables, layer, head, 2, place)
                source = int(pair[layer, head, place])
                assert torch.equal(got, entry(before, layout, tables, layer, head, 2, source))
    moved = (cache != before) & ~(cache.isnan() & before.isnan())
    assert moved.sum() <= 2 * 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim


def test_query_log_shares_the_pool_without_touching_other_blocks() -> None:
    layout = layout_of(Granularity.MODEL)
    cache = torch.zeros(layout.cache_shape(BLOCKS))
    log = cache.view(BLOCKS, layout.num_layers, 2 * layout.block_size, layout.num_kv_heads, 4)
    slots = torch.tensor([[8 * 5 + 3, 8 * 6 + 7]])
    queries = torch.randn(layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)
    for layer in range(layout.num_layers):
        store_queries(log, layer, slots, queries[layer])
    lanes = slots.expand(layout.num_layers, layout.num_kv_heads, -1)
    assert torch.equal(gather_queries(log, lanes), queries.transpose(1, 2))
    used = cache.flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert used == [5, 6]
