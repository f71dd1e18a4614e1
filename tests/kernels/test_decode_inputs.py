"""Inputs of a captured step by each kernel against the torch reference."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.attend.decode_inputs import (
    Chunks,
    DecodeInputs,
    FillInputs,
    RowTables,
    decode_inputs,
    decode_inputs_cpu,
    decode_inputs_torch,
    decode_inputs_triton,
)
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")
ROWS, COLUMNS = 7, 9


def some_rows(groups: int, heads: int, block: int = 4, log_block: int = 5) -> RowTables:
    """Lengths that differ by lane; some rows' windows begin later than they have come."""
    lanes = groups, ROWS, heads
    computed = torch.randint(0, log_block * COLUMNS - 1, (ROWS,))
    # Fields by row are lines of one array, which begin anywhere.
    others = (torch.randint(1, 9, (ROWS,)) for _ in range(2))
    by_row = torch.stack([computed, computed - 6, *others])
    by_row[1, ::3] += 9
    by_row[1].clamp_(min=0)
    tables, log = (torch.randint(1, 400, (*lanes, COLUMNS)).int() for _ in range(2))
    lengths = torch.randint(0, block * COLUMNS - 1, lanes)
    computed, first, span, stride = by_row
    return RowTables(tables, lengths, computed, log, first, span, stride, block, log_block)


def buffers(rows: RowTables, size: int, logs: bool) -> DecodeInputs:
    """Full of what no kernel writes."""
    groups, _, heads, _ = rows.block_tables.shape
    by_token, by_lane = torch.full((size,), -7), torch.full((groups, heads, size), -7)
    logged = (by_lane.clone(), by_token.clone()) if logs else (None, None)
    return DecodeInputs(by_token, by_lane, by_lane.clone(), *logged)


def values(of: RowTables | DecodeInputs) -> list[Any]:
    return [getattr(of, field.name) for field in fields(of)]


def assert_same(one: RowTables | DecodeInputs, other: RowTables | DecodeInputs) -> None:
    for field, found, expected in zip(fields(one), values(one), values(other), strict=True):
        same = torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
        assert same, field.name


FORMS = pytest.mark.parametrize(
    "fill",
    [decode_inputs_triton, pytest.param(decode_inputs_cpu, marks=pytest.mark.compiler)],
    ids=["triton", "compiled"],
)


CHUNKS = {
    "ragged": ([0, 1, 5, 6, 9], [1, 4, 1, 3]),
    "padded": ([0, 4, 8, 12], [1, 4, 2]),
    "one": ([0, 3], [3]),
    "skipped": ([0, 2, 4], [0, 2]),
}


def chunks_of(starts: list[int], lengths: list[int]) -> Chunks:
    begins = torch.tensor(starts)
    rows = torch.arange(len(lengths)).repeat_interleave(begins.diff())
    return Chunks(begins, torch.tensor(lengths), rows)


@FORMS
@thinned(
    {
        "logs": [False, True],
        "groups,heads": [(1, 1), (3, 1), (3, 2), (33, 8)],
        "step": [1, 6, 7, *CHUNKS],
        "behind": [0, 1, 6],
        "block,log_block": [(6, 7), (16, 256), (64, 3)],
    },
    together=2,
    rest=False,
)
def test_inputs(
    fill: FillInputs,
    groups: int,
    heads: int,
    step: str | int,
    behind: int,
    logs: bool,
    block: int,
    log_block: int,
) -> None:
    """A step of so many rows with a token each, or of chunks; the last rows may be ``behind`` those
    of the step. Twice: the second one goes where the first one's count says."""
    starts, lengths = (range(step + 1), [1] * step) if isinstance(step, int) else CHUNKS[step]
    rows, chunks = some_rows(groups, heads, block, log_block), None
    if isinstance(step, str):
        rows.num_computed.clamp_(max=log_block * COLUMNS - 9)
        rows.kv_lens.clamp_(max=block * COLUMNS - 9)
        chunks = chunks_of(list(starts), lengths)
    before, other = rows.num_computed.clone(), deepcopy(rows)
    count = max(len(lengths) - behind, 0)
    for _ in range(2):
        found, expected = (
            replace(buffers(rows, starts[-1], logs), chunks=chunks) for _ in range(2)
        )
        fill(rows, found, torch.tensor(count))
        decode_inputs_torch(other, expected, torch.tensor(count))
        assert_same(replace(found, chunks=None), replace(expected, chunks=None))
        assert_same(rows, other)
    added = 2 * torch.tensor(lengths[:count])
    assert torch.equal((rows.num_computed - before)[:count], added)


@FORMS
def test_refusals(fill: FillInputs) -> None:
    rows = some_rows(2, 1)
    for wrong in (buffers(some_rows(1, 1), 3, False), buffers(rows, ROWS + 1, False)):
        with pytest.raises(ValueError, match="contiguous tensors that fit them"):
            fill(rows, wrong, torch.tensor(1))


def test_a_chunk_is_its_tokens_one_after_the_other() -> None:
    rows = some_rows(2, 2, block=5, log_block=6)
    rows.num_computed.clamp_(max=6 * COLUMNS - 4)
    rows.kv_lens.clamp_(max=5 * COLUMNS - 4)
    other, chunks = deepcopy(rows), chunks_of([0, 3, 6], [3, 3])
    found = replace(buffers(rows, 6, True), chunks=chunks)
    decode_inputs_torch(rows, found, torch.tensor(2))
    for at in range(3):
        expected = buffers(other, 2, True)
        decode_inputs_torch(other, expected, torch.tensor(2))
        mine = DecodeInputs(*(x[..., at::3] for x in values(replace(found, chunks=None))[:-1]))
        assert_same(mine, expected)
    assert_same(rows, other)


def test_padding() -> None:
    """Rows that are not decoded see nothing, write to the null block and stay as they are."""
    rows = some_rows(2, 2)
    before, found = deepcopy(rows), buffers(rows, 6, True)
    decode_inputs(rows, found, torch.tensor(2))
    assert not found.positions[2:].any() and not found.slots[..., 2:].any()
    assert (found.last[..., 2:] == -1).all()
    assert found.query_slots is not None and not found.query_slots[..., 2:].any()
    assert torch.equal(rows.kv_lens[:, 2:], before.kv_lens[:, 2:])
    assert torch.equal(rows.kv_lens[:, :2], before.kv_lens[:, :2] + 1)
    assert torch.equal(rows.num_computed[:3] - before.num_computed[:3], torch.tensor([1, 1, 0]))


@FORMS
def test_columns_that_a_table_does_not_have_are_the_null_block(fill: FillInputs) -> None:
    """As for all addresses that the device alone knows: nothing else is read or written."""
    rows = some_rows(1, 2)
    rows.kv_lens.fill_(rows.block_tokens * COLUMNS)
    rows.num_computed.fill_(rows.log_block_tokens * COLUMNS)
    found = buffers(rows, 3, True)
    fill(rows, found, torch.tensor(3))
    assert not found.slots.any()
    assert found.query_slots is not None and not found.query_slots.any()
