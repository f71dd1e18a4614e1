"""Queries logged in 4 bits: what comes back, by torch, C++ and Triton, and where it is stored."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import int4_bytes
from kvserve.kernels.store.int4_log import (
    Int4Queries,
    gather_int4_cpu,
    gather_int4_torch,
    int4_log,
    quantize,
    store_int4_cpu,
    store_int4_torch,
)
from kvserve.kernels.store.int4_log_triton import gather_int4_triton, store_int4_triton

Store = Callable[[Int4Queries, int, Tensor, Tensor, Tensor], None]
BLOCKS, LAYERS, BYTES = 6, 3, 1006


def log_of(heads: int, dim: int, fill: int = 0) -> tuple[Tensor, Int4Queries, int]:
    """Memory, its reading as a log, and the tokens of a block, of which some bytes are left."""
    memory = torch.full((BLOCKS, LAYERS, BYTES), fill, dtype=torch.uint8)
    tokens = BYTES // (heads * int4_bytes(dim))
    assert tokens and BYTES % (heads * int4_bytes(dim))
    return memory, int4_log(memory, heads, dim, tokens), tokens


def test_what_comes_back() -> None:
    x = torch.randn(50, 3, 32) * torch.logspace(-3, 3, 50)[:, None, None]
    shares = torch.randn(50, 3) * 10
    found = quantize(x, shares)
    assert found.shape == x.shape and found.codes.dtype is torch.uint8
    step = x.abs().amax(-1, keepdim=True) / 7
    # Half a step, and what float16 does to the scale of seven of them.
    assert ((found.float() - x).abs() <= step * (0.5 + 7 * 2**-11) * 1.0001).all()
    torch.testing.assert_close(found.shares, shares, rtol=2**-10, atol=1e-6)
    assert torch.equal(found.rows(slice(1, 3)).float(), found.float()[:, 1:3])


def test_the_layout_of_a_vector() -> None:
    """Byte j: dimension 2j below, 2j + 1 above, each 8 above its number."""
    found = quantize(torch.tensor([[7.0, -7.0, 0.0, 3.4]]), torch.tensor([1.5]))
    assert found.codes.tolist() == [[15 | 1 << 4, 8 | 11 << 4]]
    assert found.scales.tolist() == [[1.0, 1.5]]


def test_numbers_at_the_ends_of_float16() -> None:
    x = torch.tensor([[0.0] * 8, [1e-12] * 8, [3e38] * 8])
    found = quantize(x, torch.tensor([-torch.inf, 1e9, 0.0]))
    assert found.float().isfinite().all() and found.shares.isfinite().all()
    assert (found.float()[:2] == 0).all() and (found.float()[2] == 7 * 65504).all()


SHAPES = [(4, 1, 32), (3, 2, 16), (1, 4, 64)]
STORES = [
    (store_int4_torch, torch.float32, 3, 1, 18),  # an odd number of bytes of codes
    *((store_int4_triton, dtype, *s) for s in SHAPES for dtype in (torch.float32, torch.float16)),
    *(
        pytest.param(store_int4_cpu, dtype, *shape, marks=pytest.mark.compiler)
        for shape in (*SHAPES, (5, 1, 8))
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("store", "dtype", "heads", "rows", "dim"), STORES)
def test_stores(store: Store, dtype: torch.dtype, heads: int, rows: int, dim: int) -> None:
    memory, log, tokens = log_of(heads, dim, fill=77)
    expected_memory, expected, _ = log_of(heads, dim, fill=77)
    # Not block 0, whose contents are nobody's.
    slots = (torch.randperm((BLOCKS - 1) * tokens)[: rows * 5] + tokens).view(rows, 5)
    # Tokens lie apart, as those of a fused projection.
    query = (torch.randn(5, 2 * rows * heads, dim) * 3).to(dtype)[:, : rows * heads]
    shares = torch.randn(5, rows * heads) * 8
    for layer in range(LAYERS):
        store(log, layer, slots, query, shares)
        store_int4_torch(expected, layer, slots, query, shares)
    assert torch.equal(memory, expected_memory)
    used = (memory != 77).any(dim=2)
    assert torch.equal(used.any(dim=1).nonzero()[:, 0], (slots // tokens).unique())
    assert (memory[..., tokens * heads * int4_bytes(dim) :] == 77).all()


@pytest.mark.compiler
def test_compiled_kernels_leave_out_the_null_block_and_refuse_what_is_not_there() -> None:
    memory, log, tokens = log_of(2, 16)
    query, shares = torch.randn(2, 2, 16), torch.randn(2, 2)
    store_int4_cpu(log, 0, torch.tensor([[0, tokens - 1]]), query, shares)
    assert not memory.any()
    for wrong in (-1, BLOCKS * tokens):
        with pytest.raises(IndexError, match=f"slot {wrong} is not in a pool of {BLOCKS} blocks"):
            store_int4_cpu(log, 0, torch.tensor([[tokens, wrong]]), query, shares)
        with pytest.raises(IndexError, match=f"slot {wrong} "):
            gather_int4_cpu(log, torch.full((1, 2, 1), wrong))
    assert not memory.any()
    with pytest.raises(ValueError, match=r"shares have to be .* got \[2, 1\]"):
        store_int4_cpu(log, 0, torch.tensor([[tokens, tokens]]), query, shares[:, :1])
    with pytest.raises(ValueError, match=r"queries of torch\.float16"):
        store_int4_cpu(log, 0, torch.tensor([[tokens, tokens]]), query.half(), shares)


@pytest.mark.usefixtures("device")
def test_the_triton_kernels_pass_over_slots_that_are_not_there() -> None:
    memory, log, tokens = log_of(2, 16)
    slots = torch.tensor([[-1, BLOCKS * tokens, tokens]])
    store_int4_triton(log, 1, slots, torch.ones(3, 2, 16), torch.ones(3, 2))
    assert memory.any(dim=2).nonzero().tolist() == [[1, 1]]
    found = gather_int4_triton(log, slots.expand(1, 2, -1), torch.tensor([1]))
    assert (found.float() != 0).any(-1).tolist() == [[[False, False, True]] * 2]
    with pytest.raises(ValueError, match="contiguous tokens"):
        store_int4_triton(log, 1, slots, torch.ones(3, 2, 32), torch.ones(3, 2))
    with pytest.raises(ValueError, match="float32"):
        store_int4_triton(log, 1, slots, torch.ones(3, 2, 16), torch.ones(3, 2).half())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "gather",
    [
        *(gather_int4_torch, gather_int4_triton),
        pytest.param(gather_int4_cpu, marks=pytest.mark.compiler),
    ],
)
@pytest.mark.parametrize(("heads", "rows", "dim"), SHAPES)
def test_what_is_read(gather: Callable[..., Int4Queries], heads: int, rows: int, dim: int) -> None:
    """Every lane asks for tokens of its own, of all layers or of some."""
    _, log, tokens = log_of(heads, dim)
    count = (BLOCKS - 1) * tokens // rows
    every = torch.arange(tokens, tokens + rows * count).view(rows, count)
    stored = []
    for layer in range(LAYERS):
        query = torch.randn(count, rows * heads, dim)
        shares = torch.randn(count, 1).expand(-1, rows * heads).contiguous()
        store_int4_torch(log, layer, every, query, shares)
        stored.append(quantize(query, shares))
    lane = torch.arange(rows * heads)
    for ids in (None, torch.tensor([2, 0])):
        layers = list(range(LAYERS)) if ids is None else ids.tolist()
        places = torch.randint(count, (rows * heads, len(layers), 40)).transpose(0, 1)
        slots = every[lane // heads][lane[None, :, None], places]
        found = gather(log, slots, ids)
        for at, layer in enumerate(layers):
            for part, whole in zip(found, stored[layer], strict=True):
                assert torch.equal(part[at], whole[places[at], lane[:, None]])
