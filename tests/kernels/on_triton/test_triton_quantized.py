"""Triton kernels over entries held as levels, beside torch's: on a GPU, or in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kvserve.entry_format import FORMATS, EntryFormat
from kvserve.kernels.quantized_entries import TORCH, QuantizedBlocks
from kvserve.kernels.quantized_triton import TRITON

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
