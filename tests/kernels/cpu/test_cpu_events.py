"""Where entries lie and which move, by the compiled kernels, beside torch's references."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvserve.kernels.move.events import (
    Moves,
    dropped_entries,
    event_slots,
    event_slots_torch,
    slots_of_entries,
    slots_of_entries_torch,
)

pytestmark = pytest.mark.compiler
BLOCK, LAYERS, HEADS = 4, 4, 2


@pytest.mark.parametrize(("groups", "tables"), [(1, 1), (LAYERS, 1), (2, HEADS)])
def test_slots_of_entries(groups: int, tables: int) -> None:
    """Entries of each lane, or as in all layers or heads."""
    torch.manual_seed(2)
    table = torch.randint(1, 50, (groups, 7, tables, 9), dtype=torch.int32)
    rows, lanes = torch.tensor([4, 0, 6]), (LAYERS, HEADS)
    for shape in ((LAYERS, HEADS), (LAYERS, 1), (1, 1)):
        entries = torch.randint(-3, 9 * BLOCK, (3, *shape, 11))
        if shape == (LAYERS, HEADS):
            entries = entries.transpose(0, 1).contiguous().transpose(0, 1)
        how = table, rows, entries, lanes, BLOCK
        assert torch.equal(slots_of_entries(*how), slots_of_entries_torch(*how))
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    for row, entry, message in ((7, 0, "row 7"), (-1, 0, "row -1"), (0, 36, "entry 36")):
        with pytest.raises(IndexError, match=f"{message} is not in 7 rows of 9 blocks of 4"):
            slots_of_entries(table, torch.tensor([row]), first + entry, lanes, BLOCK)


@pytest.mark.parametrize(("groups", "tables", "num_kept"), [(1, 1, 0), (1, 1, 5), (2, HEADS, 5)])
def test_event_slots(groups: int, tables: int, num_kept: int) -> None:
    """Lanes of one event differ in what they keep, lose and hold; events may move nothing, or look
    for nothing that they drop."""
    generator = torch.Generator().manual_seed(3)
    shape = 3, LAYERS, HEADS

    def any_of(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    start, before, evicted = any_of(9, 3)[:, None, None], any_of(4, *shape), any_of(8, *shape)
    chosen, counts = any_of(num_kept + 1, *shape), any_of(19, *shape)
    evicted[2, 3, 1] = chosen[2, 3, 1] = 0
    first = start + before
    each = start.expand(shape), before, evicted, counts, first, chosen + evicted, chosen
    numbers = torch.stack(each)
    kept = torch.zeros(LAYERS, 3, HEADS, num_kept, dtype=torch.int64).transpose(0, 1)
    for at in itertools.product(*map(range, shape)):
        region = torch.randperm(int((chosen + evicted)[at]), generator=generator)
        kept[at][: chosen[at]] = first[at] + region[: chosen[at]].sort().values
    table = (1 + any_of(49, groups, 7, tables, 12)).int()
    new_table = (1 + any_of(49, groups, 3, tables, 5)).int()
    for moved, lost in ((18, 8), (0, 8), (18, 0)):
        moves = Moves(kept, numbers, moved, lost, table, torch.tensor([4, 0, 6]), new_table, BLOCK)
        for found, expected in zip(event_slots(moves), event_slots_torch(moves), strict=True):
            assert torch.equal(found, expected)
            assert len(found.unique()) > 20 or not expected.numel()
    for rows, more, message in (
        ((4, 7, 6), 0, "row 7 is not in 7 rows of 12 blocks of 4"),
        ((4, 0, 6), 40, "entry [0-9]+ is not in 12 or 5 blocks of 4"),
    ):
        moved_on = torch.cat([numbers[:1] + more, numbers[1:]])
        wrong = moves._replace(rows=torch.tensor(rows), numbers=moved_on)
        with pytest.raises(IndexError, match=message):
            event_slots(wrong)


def test_dropped_entries() -> None:
    """Lanes differ in what they hold and keep; one keeps all, one nothing, one holds nothing."""
    generator = torch.Generator().manual_seed(4)
    first, length, most = torch.tensor([3, 0, 7]), 12, 9
    held = torch.randint(most, length + 1, (3, LAYERS, HEADS), generator=generator)
    counts = torch.randint(0, most, held.shape, generator=generator)
    held[0, 0, 0], counts[0, 0, 0], counts[0, 1, 0] = most, most, 0
    held[2, 3, 1] = counts[2, 3, 1] = 0
    numbers = torch.stack([first[:, None, None].expand_as(held), held, counts])
    kept = torch.zeros(LAYERS, 3, HEADS, most, dtype=torch.int64).transpose(0, 1)
    expected = torch.empty(*held.shape, length, dtype=torch.int64)
    for at in itertools.product(*map(range, held.shape)):
        order = first[at[0]] + torch.randperm(int(held[at]), generator=generator)
        stay, gone = order[: counts[at]].sort().values, order[counts[at] :].sort().values
        kept[at][: len(stay)] = stay
        expected[at] = torch.cat([gone, first[at[0]].expand(length - len(gone))])
    assert torch.equal(dropped_entries(kept, numbers, length), expected)
