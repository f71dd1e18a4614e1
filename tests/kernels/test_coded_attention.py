"""Attention that reads codes: the torch reference against loops, both kernels against it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.store.coded_entries import Slots
from tests.kernels.coded_case import DISTANCES, CodedCase, coded_case
from tests.kernels.paged_case import EACH_KERNEL, KERNELS, SCALE, assert_same, by_triton

pytestmark = pytest.mark.usefixtures("unwritten")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
# Decoding, chunks, and an empty chunk; rows without codes, of codes alone, and without entries.
HELD = [[37, 40], [30, 9], [0, 21], [12, 5], [26, 26]]
CODED = [[32, 12], [0, 4], [0, 20], [12, 0], [4, 24]]
CHUNKS = [1, 1, 1, 5, 0]
ragged = partial(coded_case, HELD, CODED, CHUNKS)


def same(kernel: str, case: CodedCase) -> None:
    within = TOLERANCE[case.q.dtype]
    assert_same(kernel, case.inputs, within, codes=case.codes)


def test_reference_against_loops() -> None:
    """Each key is turned pair by pair, as complex numbers."""
    case = ragged()
    out, codes, dim = (
        paged_attention_torch(*case.inputs, codes=case.codes),
        case.codes,
        case.q.shape[-1],
    )
    angles = 1.0 / 100.0 ** (torch.arange(0, dim, 2) / dim)
    owner = torch.arange(len(case.rows)).repeat_interleave(case.starts.diff())
    for t, h in torch.cartesian_prod(*map(torch.arange, case.q.shape[:2])).tolist():
        p, r, keys, values = int(owner[t]), h // 2, [], []
        for entry in range(int(case.last[r, t]) + 1):
            if entry >= codes.coded[p, r]:
                block, at = case.tables[p, r, entry // 4], entry % 4
                keys.append(case.keys[block, at, 0])
                values.append(case.values[block, at, 0])
                continue
            per_block = codes.slots.shape[1]
            slot = Slots.unpacked(
                codes.slots[codes.slot_tables[p, r, entry // per_block], entry % per_block]
            )
            key, value = (
                codes.vectors[codes.vector_tables[p, r, int(ref) // 8], int(ref) % 8]
                for ref in (slot.ref_k, slot.ref_v)
            )
            pairs = torch.complex(*key.chunk(2)) * torch.exp(1j * slot.distance * angles)
            keys.append(torch.cat([pairs.real, pairs.imag]) * slot.scale_k)
            values.append(value * slot.scale_v)
        expected = torch.zeros(dim)
        if keys:
            probs = torch.softmax(torch.stack(keys) @ case.q[t, h] * SCALE, dim=0)
            expected = probs @ torch.stack(values)
        torch.testing.assert_close(out[t, h], expected, atol=1e-5, rtol=1e-5)


SHAPES = [
    pytest.param({"group": 1, "dim": 64, "block": 4}, id="mha"),
    pytest.param({"group": 7, "dim": 128, "block": 4, "num_vectors": 3}, id="one block of vectors"),
    pytest.param({"group": 4, "dim": 32, "block": 4, "dtype": torch.float16}, id="half"),
]


@EACH_KERNEL
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_rows(kernel: str, shape: dict[str, Any]) -> None:
    if kernel == "cpu" and "dtype" in shape:
        shape = shape | {"dtype": torch.bfloat16}
    same(kernel, ragged(**shape))


@EACH_KERNEL
def test_long_rows_of_large_blocks(kernel: str) -> None:
    """Several tiles of codes, then of raw entries; a codebook of hundreds; tiles that hold both."""
    held, coded = [[300], [170], [129]], [[240], [112], [128]]
    same(kernel, coded_case(held, coded, [1, 20, 1], dim=32, block=16, num_vectors=400))


@EACH_KERNEL
def test_a_query_head_may_attend_to_no_code_at_all(kernel: str) -> None:
    """Whole tiles and parts of its context are hidden from it, of one row everything."""
    case = coded_case([[1300], [70], [64]], [[1296], [64], [64]], [1, 3, 1], block=16, group=3)
    slots = case.codes.slots.clone()
    slots[..., 6] &= ~1
    same(kernel, case.changed(slots=slots))


@EACH_KERNEL
def test_a_group_as_large_as_a_mask(kernel: str) -> None:
    same(kernel, coded_case([[40]], [[36]], [2], group=32))


@pytest.mark.compiler
def test_parts_of_a_long_row_are_merged() -> None:
    same("cpu", coded_case([[2100]], [[1600]], [3], block=16, num_vectors=900))


@EACH_KERNEL
def test_unmerged_codes_give_the_bits_of_the_entries(kernel: str) -> None:
    """Own vectors, turned by nothing and scaled by 1, in the place of raw entries. Triton's kernel
    adds up the halves of a turned key, so that sums may differ in their last bits."""
    case = coded_case([[24]], [[24]], [2], num_vectors=48)
    codes, number = case.codes, torch.arange(24)
    one, zero = torch.ones(24), torch.zeros_like(number)
    own = Slots(2 * number, 2 * number + 1, one, one, number, zero)
    per_block = codes.slots.shape[1]
    codes.slots[codes.slot_tables[0, 0, number // per_block].long(), number % per_block] = (
        own.packed()
    )
    cache = torch.zeros(7, 2, 4, 1, 16)
    keys, values = cache.unbind(1)
    for kind, x in enumerate((keys, values)):
        ref = 2 * number + kind
        x[1 + number // 4, number % 4, 0] = codes.vectors[
            codes.vector_tables[0, 0, ref // 8].long(), ref % 8
        ]
    tables = torch.arange(1, 7, dtype=torch.int32).view(1, 1, 6)
    nothing = codes.coded.new_zeros(1, 1)
    raw_codes = codes._replace(
        coded=nothing, slots=cache.view(7, -1).view(torch.int16).view(7, -1, 8),
        vectors=cache.view(7, 8, 16),
    )  # fmt: skip
    raw = replace(case, keys=keys, values=values, tables=tables, codes=raw_codes)
    within, attend = 0.0 if kernel == "cpu" else 1e-6, KERNELS[kernel]
    found, expected = (attend(*x.inputs, codes=x.codes) for x in (case, raw))
    torch.testing.assert_close(found, expected, atol=within, rtol=within)


@pytest.mark.parametrize("kernel", ["triton", pytest.param("cpu", marks=pytest.mark.compiler)])
@pytest.mark.parametrize(
    ("broken", "refusal"),
    [
        *(("index", "chunk 0 reads block {}"), ("book", "chunk 0 reads block -1")),
        ("distance", f"turns a key by {DISTANCES} positions"),
        ("vector", "chunk 0 refers to vector 40"),
    ],
)
def test_codes_that_refer_to_nothing(kernel: str, broken: str, refusal: str) -> None:
    """The CPU's kernel refuses them. Triton's leaves the first eight entries of a row out of its
    softmax, or all of an index block."""
    case = coded_case([[20]], [[16]], [1], num_vectors=40)
    slots, index, book = (
        x.clone() for x in (case.codes.slots, case.codes.slot_tables, case.codes.vector_tables)
    )
    block, left_out = index[0, 0, 0].long(), 16 if broken == "index" else 8
    words = slots[block, :8]
    if broken == "index":
        index[0, 0, 0] = len(slots)
    elif broken == "distance":
        words[:, 5] = DISTANCES
    elif broken == "vector":
        words[:, 1] = 40
    else:
        words[:, 0], book[0, 0, 4] = 32, -1
        slots[block, 8:16, :2] = slots[block, 8:16, :2].clamp(max=31)
    slots[block, :8] = words
    codes = case.changed(slots=slots, slot_tables=index, vector_tables=book).codes
    if kernel == "cpu":
        with pytest.raises(IndexError, match=refusal.format(len(slots))):
            paged_attention_cpu(*case.inputs, codes=codes)
        return
    fewer = _without_front(case.changed(slots=slots), left_out)
    expected = paged_attention_torch(*fewer.inputs, codes=fewer.codes)
    found = by_triton(*case.inputs, codes=codes)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def _without_front(case: CodedCase, count: int) -> CodedCase:
    """The case without its first entries, all of them codes."""
    slots, block = case.codes.slots.clone(), case.codes.slot_tables[0, 0, 0].long()
    slots[block, : 16 - count] = slots[block, count:16].clone()
    case = case.changed(slots=slots, coded=case.codes.coded - count)
    return replace(case, tables=case.tables[..., count // 4 :].contiguous(), last=case.last - count)


@pytest.mark.usefixtures("untouched_memory")
@pytest.mark.parametrize("kernel", ["triton", pytest.param("cpu", marks=pytest.mark.compiler)])
def test_offsets_exceed_31_bits(kernel: str) -> None:
    """Index and vector blocks behind 2^31 numbers, of a cache that is hardly touched."""
    case = coded_case([[20]], [[16]], [1], dim=64, block=16, num_vectors=20)
    expected, near = (
        paged_attention_torch(*case.inputs, codes=case.codes),
        torch.stack([case.keys, case.values], dim=1),
    )
    count = 2**31 // near[0].numel() + 8
    cache = torch.empty(count, 2, 16, 1, 64)
    assert cache.numel() > 2**31
    own = len(near)
    cache[-own:] = near
    far = [
        table + count - own
        for table in (case.tables, case.codes.slot_tables, case.codes.vector_tables)
    ]
    codes = case.codes._replace(
        slots=cache.view(count, -1).view(torch.int16).view(count, -1, 8),
        vectors=cache.view(count, 32, 64),
        slot_tables=far[1].int(),
        vector_tables=far[2].int(),
    )
    keys, values = cache.unbind(1)
    moved = replace(case, keys=keys, values=values, tables=far[0].int(), codes=codes)
    found = KERNELS[kernel](*moved.inputs, codes=moved.codes)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert math.isfinite(float(expected.sum()))
