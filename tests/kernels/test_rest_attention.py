"""Attention to a rest: entries whose bits differ by KV head, in blocks of their own, that tokens
see beside others. The compiled kernel goes on from one to the other, the reference sees all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvserve.entry_format import TILE, EntryFormat, few
from kvserve.kernels.attend.paged_attention import Newest, Rest, paged_attention_torch
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.store.entries import FewLayer, Shaping
from kvserve.kernels.store.few_bits import (
    FewBlocks,
    store_few_torch,
    store_layers_cpu,
    store_layers_torch,
)

HEADS, GROUP, ROWS, BLOCKS = 3, 3, 2, 12
BITS = ((1, 2), (3, 1), (4, 4))


def pool_of(
    bits: tuple[tuple[int, int], ...], heads: int, block: int, dim: int, seed: int
) -> FewBlocks:
    """A filled pool of layers of so many ``heads`` each."""
    made, at = torch.Generator().manual_seed(seed), 0
    layers = []
    for key, value in bits:
        mean = torch.randn(heads, dim, generator=made)
        layers.append(FewLayer(few(key), few(value), at, Shaping(mean)))
        at += EntryFormat("", few(key), few(value)).block_bytes(block, dim, 1, heads)
    blocks = FewBlocks(torch.zeros(BLOCKS, at, dtype=torch.uint8), tuple(layers), heads, block, dim)
    slots = torch.arange(BLOCKS * block)[None]
    for layer in range(len(bits)):
        k, v = torch.randn(2, BLOCKS * block, heads, dim, generator=made)
        store_few_torch(blocks, layer, slots, k, v)
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (7, 3)])
def test_the_compiled_kernel_equals_the_reference(
    dtype: torch.dtype, dim: int, shares: bool, lengths: tuple[int, int]
) -> None:
    made = torch.Generator().manual_seed(dim)
    main = pool_of(((3, 3),), HEADS, TILE, dim, 1)
    rest = pool_of(BITS, 1, 2 * TILE, dim, 2)
    tokens = sum(lengths)
    q = torch.randn(tokens, HEADS * GROUP, dim, generator=made).to(dtype)
    starts = torch.tensor([0, lengths[0], tokens])

    def held(blocks: int, first: int, last: tuple[int, int]) -> tuple[torch.Tensor, QuerySegments]:
        table = torch.arange(first, first + ROWS * blocks, dtype=torch.int32)
        seen = torch.tensor([last[0]] * lengths[0] + [last[1]] * lengths[1])[None]
        segments = QuerySegments(torch.arange(ROWS), seen, 200, starts, max(lengths))
        return table.view(ROWS, 1, blocks), segments

    table, chunks = held(3, 1, (40, 47))
    rest_table, rest_chunks = held(4, 2, (99, -1))  # the second row has none
    newest = torch.randn(2, BLOCKS, 8, HEADS, dim, generator=made).to(dtype)
    newest_table, newest_chunks = held(1, 1, (3, 7))
    recent = torch.randint(1, 4, (tokens,), generator=made)
    call: dict[str, Any] = {
        "scale": dim**-0.5,
        "newest": Newest(newest[0], newest[1], newest_table, newest_chunks, recent),
        "rest": Rest(*rest.beside(0, HEADS), rest_table, rest_chunks),
    }
    found = []
    for attend in (paged_attention_torch, paged_attention_cpu):
        own = None
        if shares:
            own = Shares(torch.zeros(tokens, HEADS * GROUP), torch.zeros_like(recent))
        found.append((attend(q, *main.layer(0), table, chunks, shares=own, **call), own))
    (wanted, wanted_shares), (given, given_shares) = found
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-4
    torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
    if shares:
        assert wanted_shares is not None and given_shares is not None
        torch.testing.assert_close(given_shares.out, wanted_shares.out, rtol=2e-2, atol=2e-2)
    without = paged_attention_cpu(q, *main.layer(0), table, chunks, **{**call, "rest": None})
    assert (without[: lengths[0]] - given[: lengths[0]]).abs().max() > 0.01
    assert torch.equal(without[lengths[0] :], given[lengths[0] :])


@pytest.mark.parametrize("bits", [(1, 1), (1, 2), (2, 1), (1, 4)])
@pytest.mark.parametrize("shaped", [False, True])
def test_lanes_are_written_as_the_reference_writes_them(
    bits: tuple[int, int], shaped: bool
) -> None:
    """Two of them, which differ in bits, together: with their means, orders and places."""
    made, dim, size, layers = torch.Generator().manual_seed(3), 64, 0, list[FewLayer]()
    for key, value in (bits, bits[::-1]):
        shaping = Shaping(torch.randn(1, dim, generator=made))
        if shaped:
            lower = torch.eye(dim) + 0.1 * torch.randn(1, dim, dim, generator=made).tril(-1)
            order = torch.randperm(dim, generator=made)[None]
            shaping = shaping._replace(feedback=lower, order=order)
        layers.append(FewLayer(few(key), few(value), size, shaping))
        size += EntryFormat("", few(key), few(value)).block_bytes(2 * TILE, dim, 1, 1)
    pools = []
    for store in (store_layers_torch, store_layers_cpu):
        pool = torch.zeros(4, size, dtype=torch.uint8)
        blocks = FewBlocks(pool, tuple(layers), 1, 2 * TILE, dim)
        made.manual_seed(4)
        k, v = torch.randn(2, 2, 60, 1, dim, generator=made)
        store(blocks, (1, 0), torch.randperm(128, generator=made)[None, :60], k, v)
        pools.append(pool)
    assert torch.equal(*pools)
    with pytest.raises(ValueError, match="new entries of"):
        store_layers_cpu(blocks, (1,), torch.zeros(1, 60, dtype=torch.int64), k, v)
