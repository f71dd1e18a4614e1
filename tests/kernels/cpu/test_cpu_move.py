"""Entries gathered and moved by the compiled kernels, beside torch's references."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from kvserve.kernels.compact_kv import compact_kv_torch
from kvserve.kernels.cpu import move_kv
from kvserve.kernels.gather_kv import gather_keys_torch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BLOCKS, BLOCK, LAYERS, HEADS, HELD = 12, 4, 4, 2, 37
LAYOUTS = pytest.mark.parametrize(
    ("block_layers", "block_heads"), [(4, 2), (1, 2), (2, 1)], ids=["model", "layer", "head"]
)


def cache_of(block_layers: int, block_heads: int, dtype: torch.dtype, dim: int = 24) -> Tensor:
    return torch.randn(BLOCKS, block_layers, 2, BLOCK, block_heads, dim).to(dtype)


def slots_of_rows() -> Tensor:
    """Slots of the entries of every lane, in their order: int64 [L, H, HELD]."""
    lanes = [
        [torch.randperm(BLOCKS - 1)[: -(-HELD // BLOCK)] + 1 for _ in range(HEADS)]
        for _ in range(LAYERS)
    ]
    blocks = torch.stack([torch.stack(each) for each in lanes])
    return (blocks[..., None] * BLOCK + torch.arange(BLOCK)).flatten(-2)[..., :HELD]


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered(block_layers: int, block_heads: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    cache, slots = cache_of(block_layers, block_heads, dtype), slots_of_rows()
    assert torch.equal(move_kv.gather_keys(cache, slots), gather_keys_torch(cache, slots))
    some = torch.tensor([3, 1])
    keys = gather_keys_torch(cache.flip(2), slots[some], some)
    assert torch.equal(move_kv.gather_values(cache, slots[some], some), keys)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_to_the_front(block_layers: int, block_heads: int, dtype: torch.dtype) -> None:
    """In place, where sources of some are destinations of others; and nothing else changes."""
    torch.manual_seed(1)
    slots = slots_of_rows()
    if block_layers < LAYERS or block_heads < HEADS:  # lanes that share a place in their blocks
        slots = slots[:block_layers, :block_heads]
    kept = torch.stack(
        [torch.randperm(HELD)[:19].sort().values for _ in range(slots[..., 0].numel())]
    )
    src = slots.gather(-1, kept.view(*slots.shape[:2], -1))
    cache = cache_of(block_layers, block_heads, dtype)
    expected = cache.clone()
    compact_kv_torch(expected, src, slots[..., :19])
    move_kv.move_kv(cache, src, slots[..., :19])
    assert torch.equal(cache, expected)


def test_block_0_is_not_written() -> None:
    cache = cache_of(4, 2, torch.float32)
    before = cache.clone()
    src = torch.full((LAYERS, HEADS, 3), 9)
    move_kv.move_kv(cache, src, torch.tensor([0, 2, 3]).expand_as(src))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("slot", [-1, BLOCKS * BLOCK])
def test_slots_that_are_not_there(slot: int) -> None:
    cache = cache_of(4, 2, torch.float32)
    before, wrong = cache.clone(), slots_of_rows()
    wrong[2, 1, 5] = slot
    with pytest.raises(IndexError, match=str(slot)):
        move_kv.gather_keys(cache, wrong)
    for src, dst in ((wrong, slots_of_rows()), (slots_of_rows(), wrong)):
        with pytest.raises(IndexError, match=str(slot)):
            move_kv.move_kv(cache, src, dst)
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="move_kv"):
        move_kv.move_kv(cache, wrong, wrong[..., :3])
    with pytest.raises(ValueError, match="have to be dense"):
        move_kv.gather_keys(cache[:, ::2], slots_of_rows())
