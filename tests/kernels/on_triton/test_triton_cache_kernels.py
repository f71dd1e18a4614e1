"""Stores, gathers and compaction by Triton against their torch references, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.kernels.move_kv import (
    compact_kv_torch,
    compact_kv_triton,
    gather_keys_torch,
    gather_keys_triton,
    gather_queries_torch,
    gather_queries_triton,
)
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.kernels.store_kv import (
    store_kv_torch,
    store_kv_triton,
    store_queries_torch,
    store_queries_triton,
)
from kvserve.scheduler.layout import Granularity, KVLayout

pytestmark = pytest.mark.usefixtures("device")

BLOCKS = 400
VARIANTS = [
    (Granularity.MODEL, 16, 64, torch.float16),
    (Granularity.LAYER, 5, 128, torch.bfloat16),
    (Granularity.HEAD, 4, 16, torch.float32),
]


@pytest.fixture(params=VARIANTS, ids=lambda v: v[0].value)
def layout(request: pytest.FixtureRequest) -> tuple[KVLayout, Tensor]:
    """A layout, and a cache of random numbers in it."""
    granularity, block, dim, dtype = request.param
    layout = KVLayout(2, 2, dim, block, granularity)
    return layout, torch.randn(layout.cache_shape(BLOCKS)).to(dtype)


def random_slots(layout: KVLayout, *shape: int) -> Tensor:
    """Slots outside of block 0, none twice in a lane."""
    *lanes, count = shape
    chosen = torch.rand(*lanes, (BLOCKS - 1) * layout.block_size).argsort(-1)[..., :count]
    return chosen + layout.block_size


def test_store(layout: tuple[KVLayout, Tensor]) -> None:
    shape, cache = layout
    expected = cache.clone()
    # Keys and values are views of one projection, as a model hands them over.
    both = torch.randn(7, 2 * shape.num_kv_heads, shape.head_dim).to(cache.dtype)
    key, value = both.chunk(2, dim=1)
    slots = random_slots(shape, shape.rows, 7)
    for layer in range(shape.layers_per_block):
        store_kv_torch(expected, layer, slots, key, value)
        store_kv_triton(cache, layer, slots, key, value)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("logged_as", [None, torch.uint8])
def test_store_and_gather_queries(
    layout: tuple[KVLayout, Tensor], logged_as: torch.dtype | None
) -> None:
    shape, cache = layout
    memory = cache if logged_as is None else cache.view(logged_as)
    tokens = 2 * shape.block_size * (1 if logged_as is None else cache.itemsize)
    log = memory.view(BLOCKS, shape.layers_per_block, tokens, shape.heads_per_block, shape.head_dim)
    expected = log.clone()
    slots = random_slots(shape, shape.rows, 5)
    query = (50 * torch.randn(5, 3 * shape.num_kv_heads, shape.head_dim)).to(cache.dtype)
    store_queries_torch(expected, 0, slots, query)
    store_queries_triton(log, 0, slots, query)
    assert torch.equal(log, expected)
    wanted = random_slots(shape, shape.num_layers, shape.num_kv_heads, 9)
    layers = torch.tensor([1])
    for ids, some in ((None, wanted), (layers, wanted[layers])):
        found = gather_queries_triton(log, some, ids)
        assert torch.equal(found, gather_queries_torch(log, some, ids))


def test_gather(layout: tuple[KVLayout, Tensor]) -> None:
    shape, cache = layout
    slots = random_slots(shape, shape.num_layers, shape.num_kv_heads, 70)
    assert torch.equal(gather_keys_triton(cache, slots), gather_keys_torch(cache, slots))
    empty = slots[..., :0]
    assert gather_keys_triton(cache, empty).shape == (*empty.shape, shape.head_dim)


@pytest.mark.parametrize("in_place", [True, False])
def test_compaction(layout: tuple[KVLayout, Tensor], in_place: bool) -> None:
    """Two events of unequal counts, longer than a tile, in place and into blocks of their own."""
    shape, cache = layout
    lanes, held, kept = (shape.num_layers, shape.num_kv_heads), 90, 80
    columns = -(-held // shape.block_size)
    blocks = torch.randperm(BLOCKS - 1)[: 4 * shape.groups * columns] + 1
    old, new = blocks.view(2, shape.layer_groups, 2, shape.rows, columns)
    # The first three stay where they are, and of the second event the last eleven do not exist.
    entries = torch.rand(*lanes, 2, held - 3).argsort(-1)[..., : kept - 3].sort(-1).values + 3
    entries = torch.cat([torch.arange(3).expand(*lanes, 2, 3), entries], dim=-1).flatten(2)
    place = torch.arange(kept).expand(*lanes, 2, kept).flatten(2)
    exists = (torch.arange(kept) < torch.tensor([[kept], [kept - 11]])).flatten()
    rows = torch.arange(2).repeat_interleave(kept)
    src = slot_mapping(old, rows, entries, shape.block_size)
    dst = slot_mapping(old if in_place else new, rows, place, shape.block_size)
    dst = torch.where(exists, dst, 0)
    before, expected = cache.clone(), cache.clone()
    compact_kv_torch(expected, src, dst)
    compact_kv_triton(cache, src, dst, runs=2)
    assert torch.equal(cache[1:], expected[1:])
    assert not torch.equal(cache, before)


def test_slots_outside_of_the_cache_are_left_alone() -> None:
    cache = torch.randn(KVLayout(1, 1, 16, 4).cache_shape(3))
    before = cache.clone()
    outside = torch.tensor([[[-1, 12, 1 << 40]]])
    inside = torch.tensor([[[4, 5, 6]]])
    entry = torch.randn(3, 1, 16)
    store_kv_triton(cache, 0, outside[0], entry, entry)
    compact_kv_triton(cache, outside, inside)
    compact_kv_triton(cache, inside, outside)
    assert torch.equal(cache, before)
    assert not gather_keys_triton(cache, outside).any()


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_exceed_31_bits() -> None:
    cache = torch.empty(70_000, 2, 2, 64, 2, 64, dtype=torch.uint8)
    assert cache.numel() > 2**31
    last = (cache.shape[0] - 1) * 64
    entry = torch.arange(1, 5 * 2 * 64 + 1).to(torch.uint8).view(5, 2, 64)
    slots = last + torch.arange(5)
    store_kv_triton(cache, 1, slots[None], entry, entry)
    assert torch.equal(cache[-1, 1, 0, :5], entry)
    src, dst = (x.expand(2, 2, -1) for x in (slots[1:], last - 64 + torch.arange(4)))
    compact_kv_triton(cache, src, dst)
    assert torch.equal(cache[-2, 1, 1, :4], entry[1:])
    assert torch.equal(gather_keys_triton(cache, dst)[1], entry[1:].transpose(0, 1))
