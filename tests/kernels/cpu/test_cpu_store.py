"""What the CPU's compiled kernels store, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.store_kv import (
    store_kv_cpu,
    store_kv_torch,
    store_queries_cpu,
    store_queries_torch,
)

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_store(tokens: int, tables: int, dtype: torch.dtype) -> None:
    cache, expected = torch.zeros(2, 20, 3, 2, 8, 4 // tables, 16, dtype=dtype)
    slots = torch.randperm(160)[: tables * tokens].view(tables, tokens)
    key, value = torch.randn(tokens, 9, 16).to(dtype).split([5, 4], dim=1)
    store_kv_cpu(cache, 1, slots, key[:, :4], value)
    store_kv_torch(expected, 1, slots, key[:, :4], value)
    assert torch.equal(cache, expected)
    assert bool(cache.any()) is bool(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 16), (4, 12)])
def test_log_queries(tables: int, group: int, dim: int, dtype: torch.dtype) -> None:
    """Means over groups; what goes to block 0 is not written."""
    log, expected = torch.zeros(2, 20, 3, 8, 4 // tables, dim, dtype=dtype)
    slots = torch.cat([torch.zeros(3, dtype=torch.int64), torch.randperm(152)[:11] + 8])
    slots = slots[torch.randperm(14)].view(tables, -1)
    query = torch.randn(slots.shape[1], 4 * group + 2, dim).to(dtype)[:, : 4 * group]
    store_queries_cpu(log, 1, slots, query)
    store_queries_torch(expected, 1, slots, query)
    expected[0] = 0
    torch.testing.assert_close(log, expected, atol=0.0, rtol=2**-7 if group == 4 else 0.0)
    assert log.any()


def test_queries_that_do_not_fit_the_log_are_refused() -> None:
    log, query = torch.zeros(20, 3, 8, 2, 16), torch.ones(3, 4, 16)
    with pytest.raises(IndexError, match="store_queries: slot 160 is not in a pool of 20 blocks"):
        store_queries_cpu(log, 0, torch.tensor([[8, 9, 160]]), query)
    assert not log.any()
    with pytest.raises(ValueError, match=r"new entries \[3, 3, 16\] .*: \[3, 2, 16\] is needed"):
        store_queries_cpu(log, 0, torch.tensor([[8, 9, 10]]), query[:, :3])
    with pytest.raises(ValueError, match=r"new entries of torch.float64"):
        store_queries_cpu(log, 0, torch.tensor([[8, 9, 10]]), query.double())


@pytest.mark.parametrize("slot", [-1, 160, 2**40])
def test_a_slot_outside_of_the_pool_is_refused_before_anything_is_written(slot: int) -> None:
    cache, new = torch.zeros(20, 3, 2, 8, 2, 16), torch.ones(3, 2, 16)
    with pytest.raises(IndexError, match=f"slot {slot} is not in a pool of 20 blocks of 8"):
        store_kv_cpu(cache, 0, torch.tensor([[8, 9, slot]]), new, new)
    assert not cache.any()


def test_entries_that_do_not_fit_the_cache_are_refused() -> None:
    cache, new = torch.zeros(20, 3, 2, 8, 2, 16), torch.ones(3, 2, 16)
    slots = torch.tensor([[8, 9, 10]])
    with pytest.raises(ValueError, match=r"new entries \[3, 1, 16\] .*: \[3, 2, 16\] is needed"):
        store_kv_cpu(cache, 0, slots, new[:, :1], new)
    with pytest.raises(ValueError, match=r"new entries of torch.float64"):
        store_kv_cpu(cache, 0, slots, new, new.double())
    with pytest.raises(ValueError, match=r"slots of torch.int32"):
        store_kv_cpu(cache, 0, slots.int(), new, new)


def test_offsets_beyond_what_32_bits_hold() -> None:
    """A cache of 3 * 2^30 numbers, of which nothing but what is stored here is ever touched."""
    layers = 2**21
    cache = torch.empty(3, layers, 2, 8, 2, 16, dtype=torch.bfloat16)
    new = torch.randn(8, 2, 16).to(torch.bfloat16)
    store_kv_cpu(cache, layers - 1, torch.arange(16, 24)[None], new, new.neg())
    assert torch.equal(cache[2, layers - 1, 0], new)
    keys, values = cache[:, layers - 1].unbind(1)
    tables = torch.full((1, 1, 1), 2, dtype=torch.int32)
    chunks = QuerySegments(torch.tensor([0]), torch.tensor([[7]]), 8, torch.tensor([0, 1]))
    query = torch.randn(1, 4, 16).to(torch.bfloat16)
    found = paged_attention_cpu(query, keys, values, tables, chunks, 0.3)
    keys, values = cache[2:, layers - 1].unbind(1)
    expected = paged_attention_torch(query, keys, values, tables - 2, chunks, 0.3)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
