"""Triton's kernels of entries in few bits: the bytes and the numbers of the references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import few
from kvserve.kernels.storage import TORCH, TRITON
from kvserve.kernels.store.entries import FewLayer, Shaping
from kvserve.kernels.store.few_bits import FewBlocks
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")
BITS = [(4, 3), (2, 4), (3, 2), (1, 1)]  # of keys and values, by layer
COUNT, TOKENS = 12, 21


def shaping(heads: int, dim: int) -> Shaping:
    feedback = torch.tril(torch.randn(heads, dim, dim) * 0.1, -1) + torch.eye(dim)
    order = torch.stack([torch.randperm(dim) for _ in range(heads)])
    return Shaping(torch.randn(heads, dim), feedback, order)


def pool_of(block: int, dim: int, tables: int) -> FewBlocks:
    """Layers of all bits, every other one shaped, with two KV heads in all."""
    layers, at = [], 0
    for number, (key, value) in enumerate(map(few, bits) for bits in BITS):
        own = shaping(2, dim)
        layers.append(FewLayer(key, value, at, own if number % 2 else Shaping(own.mean)))
        at += 2 // tables * block * (key.size(dim) + value.size(dim))
    pool = torch.randint(0, 256, (COUNT, at), dtype=torch.uint8)
    return FewBlocks(pool, tuple(layers), 2 // tables, block, dim)


def copy_of(blocks: FewBlocks) -> FewBlocks:
    return FewBlocks(
        blocks.pool.clone(), blocks.layers, blocks.heads, blocks.block_size, blocks.dim
    )


def new_slots(block: int, tables: int) -> Tensor:
    return (torch.randperm((COUNT - 1) * block)[: tables * TOKENS] + block).view(tables, -1)


@thinned(
    {
        "dim": [16, 32, 64, 128, 256],
        "block": [16, 32, 64],
        "dtype": [torch.float32, torch.bfloat16],
        "tables": [1, 2],
    }
)
def test_bytes_are_those_of_the_reference(
    dim: int, block: int, dtype: torch.dtype, tables: int
) -> None:
    """And what is read of them. Vectors are tiny, huge, 0, and not finite."""
    ours = pool_of(block, dim, tables)
    theirs, slots = copy_of(ours), new_slots(block, tables)
    for layer in range(len(BITS)):
        new = torch.randn(2, TOKENS, 3, dim) * torch.logspace(-4, 4, TOKENS)[:, None, None]
        new[:, 0], new[0, 3, 0, 2], new[1, 4, 1, 3] = 0.0, torch.inf, torch.nan
        key, value = new.to(dtype)[:, :, :2]
        TRITON.few.store(ours, layer, slots, key, value)
        TORCH.few.store(theirs, layer, slots, key, value)
        assert torch.equal(ours.pool, theirs.pool), BITS[layer]
    lanes = slots.repeat_interleave(2 // tables, dim=0).expand(len(BITS), 2, -1)
    for layers in ([0, 1, 2, 3], [2, 0]):
        for values in (False, True):
            given = layers, lanes[: len(layers)], torch.float32, values
            expected = TORCH.few.gather(ours, *given)
            assert torch.equal(TRITON.few.gather(ours, *given), expected)


@pytest.mark.parametrize("block", [16, 64])
def test_moves(block: int) -> None:
    """Two events in blocks of their own, in place; what goes to block 0 is nobody's."""
    held, kept = 5 * block, 5 * block - 9
    ours = pool_of(block, 32, 1)
    theirs, before = copy_of(ours), ours.pool.clone()
    own = (torch.randperm(COUNT - 2)[:10] + 1).view(2, 5)
    entries = torch.rand(4, 2, 2, held).argsort(-1)[..., :kept].sort(-1).values
    at = torch.arange(kept).expand_as(entries)
    src, dst = (
        (own[torch.arange(2)[:, None], x // block] * block + x % block).flatten(2)
        for x in (entries, at)
    )
    dst[..., -3:] = 0
    for kernels, blocks in ((TRITON, ours), (TORCH, theirs)):
        kernels.few.move(blocks, [0, 1, 2, 3], src, dst, 2)
    assert torch.equal(ours.pool[1:], theirs.pool[1:])
    assert not torch.equal(ours.pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_turned_heads(dim: int, dtype: torch.dtype) -> None:
    x, mean = torch.randn(7, 9, dim).to(dtype), torch.randn(4, dim)
    for given in ((x[:, 2:6], mean), (x, None), (x[:, :5], None, torch.float32), (x[:0], None)):
        assert torch.equal(TRITON.few.turn(*given), TORCH.few.turn(*given))


def test_slots_outside_of_the_cache_are_left_alone() -> None:
    blocks, end = pool_of(16, 16, 1), COUNT * 16
    before, new = blocks.pool.clone(), torch.randn(3, 2, 16)
    outside, inside = torch.tensor([-1, end, 1 << 40]), torch.tensor([20, 21, 22])
    TRITON.few.store(blocks, 1, outside[None], new, new)
    for src, dst in ((outside, inside), (inside, outside)):
        TRITON.few.move(blocks, [1], *(x.expand(1, 2, -1) for x in (src, dst)))
    assert torch.equal(blocks.pool, before)
    assert not TRITON.few.gather(blocks, [1], outside.expand(1, 2, -1), torch.float32).any()


def test_shapes_that_do_not_fit_are_refused() -> None:
    blocks, slots, new = pool_of(16, 16, 1), torch.tensor([[16, 17, 18]]), torch.randn(3, 2, 16)
    with pytest.raises(ValueError, match=r"\[3, 2, 16\] with contiguous tokens expected"):
        TRITON.few.store(blocks, 0, slots, new, new[:, :1])
    with pytest.raises(ValueError, match="heads are dense"):
        TRITON.few.turn(torch.randn(3, 16, 16)[:, ::2])
    with pytest.raises(ValueError, match="not 2 equal runs"):
        TRITON.few.move(blocks, [0], slots[None], slots[None], 2)
