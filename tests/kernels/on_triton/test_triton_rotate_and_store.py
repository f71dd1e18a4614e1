"""Rotation and store in one launch: bit for bit what the two kernels that it replaces give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.kernels.elementwise import rotate_triton
from kvserve.kernels.store_kv import (
    rotate_and_store_torch,
    rotate_and_store_triton,
    store_kv_triton,
)
from kvserve.scheduler.layout import Granularity, KVLayout

pytestmark = pytest.mark.usefixtures("device")
BLOCKS = 40
# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] * torch.cuda.is_available())]


def projected(
    layout: KVLayout, tokens: int, group: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys, values behind them in the same rows, cosines and sines."""
    heads = layout.num_kv_heads
    both = torch.randn(tokens, (group + 2) * heads, layout.head_dim).to(dtype)
    qk, v = both.split([(group + 1) * heads, heads], dim=1)
    cos, sin = torch.randn(2, tokens, 1, layout.head_dim).to(dtype)
    return qk, v, cos, sin


def slots_of(layout: KVLayout, tokens: int) -> Tensor:
    chosen = torch.randperm((BLOCKS - 1) * layout.block_size)[: layout.rows * tokens]
    return chosen.view(layout.rows, tokens) + layout.block_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", list(Granularity), ids=lambda g: g.value)
@pytest.mark.parametrize(("tokens", "group", "dim", "block"), [(1, 4, 16, 4), (5, 7, 70, 5)])
def test_as_both_kernels(
    granularity: Granularity, tokens: int, group: int, dim: int, block: int, dtype: torch.dtype
) -> None:
    layout = KVLayout(2, 3, dim, block, granularity)
    cache = torch.randn(layout.cache_shape(BLOCKS)).to(dtype)
    qk, v, cos, sin = projected(layout, tokens, group, dtype)
    slots, expected, by_torch = slots_of(layout, tokens), cache.clone(), cache.clone()
    for place in range(layout.layers_per_block):
        q = rotate_and_store_triton(cache, place, slots, qk, v, cos, sin)
        right, k = rotate_triton(qk, cos, sin).split([3 * group, 3], dim=1)
        store_kv_triton(expected, place, slots, k, v)
        assert torch.equal(q, right)
        other = rotate_and_store_torch(by_torch, place, slots, qk, v, cos, sin)
        torch.testing.assert_close(q, other, atol=2e-3, rtol=2e-3)
    assert torch.equal(cache, expected)
    torch.testing.assert_close(cache, by_torch, atol=2e-3, rtol=2e-3)


def test_no_tokens_and_slots_outside_of_the_cache() -> None:
    layout = KVLayout(1, 2, 8, 4)
    cache = torch.randn(layout.cache_shape(3))
    before = cache.clone()
    qk, v, cos, sin = projected(layout, 3, 2, torch.float32)
    q = rotate_and_store_triton(cache, 0, torch.tensor([[-1, 12, 1 << 40]]), qk, v, cos, sin)
    assert torch.equal(q, rotate_triton(qk, cos, sin)[:, :4]) and torch.equal(cache, before)
    none = rotate_and_store_triton(
        cache, 0, torch.ones(1, 0).long(), qk[:0], v[:0], cos[:0], sin[:0]
    )
    assert none.shape == (0, 4, 8)


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_exceed_31_bits() -> None:
    layout = KVLayout(2, 2, 64, 64)
    cache = torch.empty(layout.cache_shape(35_000), dtype=torch.float16)
    assert cache.nbytes > 2**31
    qk, v, _, _ = projected(layout, 5, 1, torch.float16)
    slots = torch.arange(5)[None] + (len(cache) - 1) * layout.block_size
    zeros = torch.zeros(5, 1, 64, dtype=torch.float16)
    rotate_and_store_triton(cache, 1, slots, qk, v, zeros + 1, zeros)
    assert torch.equal(cache[-1, 1, 0, :5], qk[:, 2:]) and torch.equal(cache[-1, 1, 1, :5], v)
