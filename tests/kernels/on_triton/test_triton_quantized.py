"""Triton kernels over entries held as levels, beside torch's: on a GPU, or in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvserve.entry_format import FORMATS, EntryFormat
from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.quantized_entries import TORCH, QuantizedBlocks
from kvserve.kernels.quantized_triton import TRITON
from kvserve.kernels.query_segments import QuerySegments
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")
EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
BLOCK, DIM = 16, 64


def new_blocks(
    form: EntryFormat, blocks: int = 8, heads: int = 2, dim: int = DIM
) -> QuantizedBlocks:
    pool = torch.full((blocks, 2, heads * form.lane_bytes(BLOCK, dim)), 7, dtype=torch.uint8)
    return QuantizedBlocks(pool, form, BLOCK, dim)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_store_gather_and_move(form: EntryFormat, dtype: torch.dtype) -> None:
    """The same bytes, and the same numbers of them."""
    ours, reference = new_blocks(form), new_blocks(form)
    slots = torch.randperm(7 * BLOCK)[:12][None] + BLOCK
    for layer in range(2):
        wide = torch.randn(12, 4, DIM).to(dtype)
        wide[0], wide[1] = 0.0, 1.3
        key, value = wide[:, :2], wide[:, 2:]
        TRITON.store(ours, layer, slots, key, value)
        TORCH.store(reference, layer, slots, key, value)
    assert torch.equal(ours.pool, reference.pool)
    lanes = slots.expand(2, 2, -1)
    for values in (False, True):
        found, expected = (
            kernels.gather(ours, lanes, None, dtype, values) for kernels in (TRITON, TORCH)
        )
        # One of them may round the sum with int4's low once less.
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    outside = torch.full_like(lanes[..., :1], 8 * BLOCK)
    assert not TRITON.gather(ours, outside, None, dtype).any()
    source = torch.cat([lanes[..., :5], outside], dim=-1)
    target = torch.cat([lanes[..., 5:9], torch.full_like(outside, 3), outside - 1], dim=-1)
    TRITON.move(ours, source, target, 1)
    TORCH.move(reference, lanes[..., :4], lanes[..., 5:9], 1)
    assert torch.equal(ours.pool, reference.pool)


class Rows:
    """Three rows of tables, one of them nobody's, over the second of two layers."""

    def __init__(
        self, form: EntryFormat, tables: int, group: int, dtype: torch.dtype, dim: int = DIM
    ) -> None:
        heads, columns, self.held = 2 // tables, 3, [40, 21]
        self.blocks = new_blocks(form, 20, heads, dim)
        names = torch.randperm(19)[: 2 * tables * columns] + 1
        own = names.view(2, tables, columns)
        self.tables = torch.cat([own, torch.full((1, tables, columns), -1)]).int()
        for row, length in enumerate(self.held):
            place = torch.arange(length)
            slots = own[row][:, place // BLOCK] * BLOCK + place % BLOCK
            k, v = torch.randn(2, length, 2, dim)
            TORCH.store(self.blocks, 1, slots, k, v + 0.3)
        self.q = torch.randn(64, 2 * group, dim).to(dtype)
        self.per_row = tables

    def arguments(self, lengths: list[int]) -> tuple[Any, ...]:
        last = torch.cat([torch.arange(h - n, h) for h, n in zip(self.held, lengths, strict=True)])
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)]) if max(lengths) > 1 else None
        last = last.expand(self.per_row, -1).int().contiguous()
        rows = torch.arange(2)
        segments = QuerySegments(rows, last, 40, starts, max(lengths))
        k, v = self.blocks.layer(1)
        return self.q[: sum(lengths)], k, v, self.tables, segments, 0.3


@thinned(
    {
        "form": list(FORMATS.values()),
        "lengths": [[1, 1], [9, 4]],
        "tables,dim": [(1, 32), (2, 128)],
    },
    together=2,
)
def test_attention(form: EntryFormat, tables: int, dim: int, lengths: list[int]) -> None:
    dtype = torch.float32 if tables == 1 else torch.float16
    case = Rows(form, tables, 2, dtype, dim).arguments(lengths)
    within = 1e-5 if dtype is torch.float32 else 4e-3
    expected = paged_attention_torch(*case)
    for splits in (1, 2):
        found = paged_attention_triton(*case, num_splits=splits)  # type: ignore[misc]
        torch.testing.assert_close(found, expected, atol=within, rtol=within)
