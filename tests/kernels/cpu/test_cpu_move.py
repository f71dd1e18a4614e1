"""Entries gathered and moved by the compiled kernels, beside torch's references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.kernels.events import (
    moved_entries_cpu,
    moved_entries_torch,
    slots_of_entries_cpu,
    slots_of_entries_torch,
)
from kvserve.kernels.move_kv import (
    compact_kv_cpu,
    compact_kv_torch,
    gather_keys_cpu,
    gather_keys_torch,
    gather_values_cpu,
)

pytestmark = pytest.mark.compiler
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
    cache, slots = cache_of(block_layers, block_heads, dtype), slots_of_rows()
    assert torch.equal(gather_keys_cpu(cache, slots), gather_keys_torch(cache, slots))
    some = torch.tensor([3, 1])
    keys = gather_keys_torch(cache.flip(2), slots[some], some)
    assert torch.equal(gather_values_cpu(cache, slots[some], some), keys)


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
    compact_kv_cpu(cache, src, slots[..., :19])
    assert torch.equal(cache, expected)


def test_block_0_is_not_written() -> None:
    cache = cache_of(4, 2, torch.float32)
    before = cache.clone()
    src = torch.full((LAYERS, HEADS, 3), 9)
    compact_kv_cpu(cache, src, torch.tensor([0, 2, 3]).expand_as(src))
    assert torch.equal(cache, before)


@pytest.mark.parametrize("slot", [-1, BLOCKS * BLOCK])
def test_slots_that_are_not_there(slot: int) -> None:
    cache = cache_of(4, 2, torch.float32)
    before, wrong = cache.clone(), slots_of_rows()
    wrong[2, 1, 5] = slot
    with pytest.raises(IndexError, match=str(slot)):
        gather_keys_cpu(cache, wrong)
    for src, dst in ((wrong, slots_of_rows()), (slots_of_rows(), wrong)):
        with pytest.raises(IndexError, match=str(slot)):
            compact_kv_cpu(cache, src, dst)
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="move_kv"):
        compact_kv_cpu(cache, wrong, wrong[..., :3])
    with pytest.raises(ValueError, match="have to be dense"):
        gather_keys_cpu(cache[:, ::2], slots_of_rows())


@pytest.mark.parametrize(("groups", "tables"), [(1, 1), (LAYERS, 1), (2, HEADS)])
def test_slots_of_entries(groups: int, tables: int) -> None:
    """Entries of each lane, or as in all layers or heads; those behind a lane's end have none."""
    torch.manual_seed(2)
    table = torch.randint(1, 50, (groups, 7, tables, 9), dtype=torch.int32)
    rows, lanes = torch.tensor([4, 0, 6]), (LAYERS, HEADS)
    counts = torch.randint(0, 12, (3, LAYERS, HEADS))
    for shape in ((LAYERS, HEADS), (LAYERS, 1), (1, 1)):
        entries = torch.randint(-3, 9 * BLOCK, (3, *shape, 11))
        if shape == (LAYERS, HEADS):
            entries = entries.transpose(0, 1).contiguous().transpose(0, 1)
        how = table, rows, entries, lanes, BLOCK
        expected = slots_of_entries_torch(*how)
        assert torch.equal(slots_of_entries_cpu(*how), expected)
        for some in (counts, counts[:, :1, :1]):
            found = slots_of_entries_cpu(*how, some)
            assert torch.equal(found, slots_of_entries_torch(*how, some))
            assert (found == 0).any() and not torch.equal(found, expected)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    for row, entry, message in ((7, 0, "row 7"), (-1, 0, "row -1"), (0, 36, "entry 36")):
        with pytest.raises(IndexError, match=f"{message} is not in 7 rows of 9 blocks of 4"):
            slots_of_entries_cpu(table, torch.tensor([row]), first + entry, lanes, BLOCK)


@pytest.mark.parametrize("num_kept", [0, 5])
def test_moved_entries(num_kept: int) -> None:
    """Lanes of one event differ in what they keep, lose and hold."""
    torch.manual_seed(3)
    shape = 3, LAYERS, HEADS
    kept = torch.randint(20, 60, (LAYERS, 3, HEADS, num_kept)).transpose(0, 1)
    limits = (9, 4, num_kept + 1, 30, 19)
    numbers = torch.stack([torch.randint(limit, shape) for limit in limits])
    found = moved_entries_cpu(kept, numbers, 18)
    assert torch.equal(found, moved_entries_torch(kept, numbers, 18))
    assert len(found.unique()) > 20
