"""The CPU's compiled kernels against plain indexing, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_cpu import CpuQuerySegments, paged_attention
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.store_kv import (
    store_kv_cpu,
    store_kv_torch,
    store_queries_cpu,
    store_queries_torch,
)

pytestmark = pytest.mark.compiler
SCALE = 0.3
COLUMNS = 12


@dataclass(frozen=True)
class Shape:
    """Granularities: model (LG, R) = (1, 1), layer (L, 1), head (L, Hkv)."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block: int = 8
    groups: int = 1
    tables: int = 1
    layers: int = 1
    columns: int = COLUMNS


def reference_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: CpuQuerySegments,
    group: int,
) -> Tensor:
    last, table = chunks.last[group], tables[group]
    paged = QuerySegments(chunks.rows, last, int(last.max()) + 1, chunks.starts)
    return paged_attention_torch(query, keys, values, table, paged, SCALE)


@dataclass(frozen=True)
class Case:
    """Arguments of one call; blocks that no row holds, and entries behind a row's end, are NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    chunks: CpuQuerySegments

    def run(self, group: int = 0) -> Tensor:
        return paged_attention(
            self.query, self.keys, self.values, self.tables, self.chunks, group, SCALE
        )

    def expected(self, group: int = 0) -> Tensor:
        clean = self.keys.nan_to_num(), self.values.nan_to_num()
        return reference_attention(self.query, *clean, self.tables, self.chunks, group)


def make(
    shape: Shape,
    held: Sequence[int],
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Chunk s is the last ``lengths[s]`` tokens of a row of ``held[s]`` entries (in other tables
    and groups: up to 3 fewer)."""
    generator = torch.Generator().manual_seed(seed)
    count, size = len(held), shape.block
    fewer = torch.randint(0, 4, (shape.groups, shape.tables, count), generator=generator)
    ends = (torch.tensor(held) - fewer).clamp(min=0)
    num_blocks = shape.groups * count * shape.tables * shape.columns + 1
    names = torch.randperm(num_blocks - 1, generator=generator).to(torch.int32) + 1
    tables = names.view(shape.groups, count, shape.tables, shape.columns)
    cache_shape = num_blocks, shape.layers, 2, size, shape.kv_heads // shape.tables, shape.dim
    cache = torch.randn(cache_shape, generator=generator)
    cache[0] = torch.nan
    rows = torch.randperm(count, generator=generator)
    for group in range(shape.groups):
        for chunk, row in enumerate(rows.tolist()):
            for table in range(shape.tables):
                behind = torch.arange(shape.columns * size) >= ends[group, table, chunk]
                at = tables[group, row, table].long().repeat_interleave(size)
                place = torch.arange(size).repeat(shape.columns)
                cache[at[behind], :, :, place[behind]] = torch.nan
    steps = torch.cat([torch.arange(length) - length + 1 for length in lengths])
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    last = (ends[:, :, owner] - 1 + steps).clamp(min=-1)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    wide = torch.randn(sum(lengths), shape.heads + 3, shape.dim, generator=generator).to(dtype)
    keys, values = cache.to(dtype)[:, shape.layers - 1].unbind(1)
    return Case(wide[:, : shape.heads], keys, values, tables, CpuQuerySegments(rows, starts, last))


def agrees(case: Case, group: int = 0) -> None:
    within = 1e-5 if case.query.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(case.run(group), case.expected(group), atol=within, rtol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 128, 256])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    agrees(make(Shape(dim=dim, layers=2), [1, 17, 96], [1, 1, 5], dtype))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (7, 1), (40, 1), (12, 3)])
def test_head_groups(heads: int, kv_heads: int) -> None:
    agrees(make(Shape(heads=heads, kv_heads=kv_heads), [3, 65, 64], [1, 2, 40]))


@pytest.mark.parametrize("block", [1, 6, 16, 64, 100])
def test_block_sizes(block: int) -> None:
    agrees(make(Shape(block=block, columns=-(-200 // block)), [200, 129, 1], [1, 33, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("groups", "tables"), [(1, 1), (3, 1), (3, 2)])
def test_granularities(groups: int, tables: int, dtype: torch.dtype) -> None:
    shape = Shape(heads=8, groups=groups, tables=tables)
    case = make(shape, [90, 1, 66, 70], [1, 1, 66, 7], dtype)
    for group in range(groups):
        agrees(case, group)


def test_tokens_that_see_nothing_get_zeros() -> None:
    case = make(Shape(), [9, 0, 2], [1, 1, 5])
    assert case.chunks.last.min() == -1
    agrees(case)
    assert not case.run()[[1, 2, 3]].any()


def test_limits_of_a_chunk_need_not_ascend() -> None:
    """An observation pass asks for any subset of tokens, in any order."""
    case = make(Shape(), [96, 40], [40, 3])
    shuffled = case.chunks.last[..., torch.randperm(43, generator=torch.Generator().manual_seed(1))]
    shuffled[..., 40:] = torch.tensor([3, 39, 0]).clamp(max=int(case.chunks.last[0, 0, -1]))
    agrees(replace(case, chunks=replace(case.chunks, last=shuffled.clamp(max=36))))


@pytest.mark.parametrize("tables", [1, 2])
def test_a_long_context_is_the_same_on_any_number_of_threads(tables: int) -> None:
    shape = Shape(block=16, columns=200, tables=tables)
    case = make(shape, [3200, 2048, 2049, 5], [1, 1, 40, 1])
    agrees(case)
    alone = case.run()
    try:
        torch.set_num_threads(3)
        assert torch.equal(case.run(), alone)
    finally:
        torch.set_num_threads(1)


def test_large_logits_do_not_overflow() -> None:
    case = make(Shape(), [90, 12], [1, 5])
    agrees(replace(case, query=(case.query * 200).clone()))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("block", "chunk 1 reads block 1000000, which is not one of the pool"),
        ("freed", "chunk 1 reads block 0,"),
        ("negative", "chunk 1 reads block -5,"),
        ("entry", "chunk 1 sees entry 96, which its tables do not hold"),
        ("row", "chunk 1 is of table row 2, which is not there"),
        ("chunk", "chunk 1 ends at token 7, which is not there"),
    ],
)
def test_what_is_not_there_is_refused(broken: str, message: str) -> None:
    case = make(Shape(), [96, 80], [1, 5])
    rows, starts, last = case.chunks.rows, case.chunks.starts, case.chunks.last
    names = {"block": 1_000_000, "freed": 0, "negative": -5}
    if broken in names:
        case.tables[0, rows[1], 0, 9] = names[broken]
    elif broken == "entry":
        last[0, 0, 3] = 96
    elif broken == "row":
        rows[1] = 2
    else:
        starts[2] = 7
    with pytest.raises(IndexError, match=message):
        case.run()


def test_shapes_it_is_not_built_for_are_refused_by_name() -> None:
    case = make(Shape(dim=12), [9], [1])
    with pytest.raises(ValueError, match=r"head_dim 12 .* \(query \[1, 4, 12\], blocks \[13, 8, "):
        case.run()
    with pytest.raises(ValueError, match="head_dim 264"):
        make(Shape(dim=264), [9], [1]).run()
    with pytest.raises(ValueError, match=r"dtype torch.float16"):
        make(Shape(), [9], [1], torch.float16).run()
    with pytest.raises(ValueError, match="do not divide"):
        make(Shape(heads=5), [9], [1]).run()
    fine = make(Shape(), [9], [1])
    with pytest.raises(ValueError, match="not dense"):
        replace(fine, keys=fine.keys.mT.contiguous().mT).run()
    with pytest.raises(ValueError, match="not laid out alike"):
        replace(fine, values=fine.values.clone()).run()
    with pytest.raises(ValueError, match="tables are not dense int32"):
        replace(fine, tables=fine.tables.long()).run()
    with pytest.raises(ValueError, match="chunks are not dense int64"):
        replace(fine, chunks=replace(fine.chunks, last=fine.chunks.last.int())).run()
    with pytest.raises(ValueError, match="chunks do not fit"):
        replace(fine, query=torch.cat([fine.query, fine.query])).run()


# ---- store --------------------------------------------------------------------------------------


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
    tables = torch.full((1, 1, 1, 1), 2, dtype=torch.int32)
    chunks = CpuQuerySegments(torch.tensor([0]), torch.tensor([0, 1]), torch.tensor([[[7]]]))
    query = torch.randn(1, 4, 16).to(torch.bfloat16)
    found = paged_attention(query, keys, values, tables, chunks, 0, SCALE)
    keys, values = cache[2:, layers - 1].unbind(1)
    expected = reference_attention(query, keys, values, tables - 2, chunks, 0)
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
