"""A tile of entries that are held as codes (``coded_entries.py``), as a Triton kernel reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper

if TYPE_CHECKING:
    import triton.language as tl


@Helper
def coded_tile(
    entry,
    stop,
    row,
    slots,
    vectors,
    slot_tables,
    vector_tables,
    turns,
    slot_columns,
    vector_columns,
    num_turns,
    num_blocks,
    dims,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Which entries are known, the key of each and where its value lies, and the scales of both."""
    HALF: tl.constexpr = DIM // 2
    block = tl.load(
        slot_tables + row * slot_columns + entry // SLOTS,
        mask=(entry < stop) & (entry // SLOTS < slot_columns),
        other=-1,
    ).to(tl.int64)
    known = (block >= 0) & (block < num_blocks)
    slot = slots + (block * SLOTS + entry % SLOTS) * 4
    refs = tl.load(slot, mask=known, other=0)
    scales = tl.load(slot + 1, mask=known, other=0)
    distance = tl.load(slot + 2, mask=known, other=0) >> 16
    k_ref, v_ref = refs & 0xFFFF, (refs >> 16) & 0xFFFF
    k_scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    v_scale = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    known = known & (tl.abs(distance) < num_turns)
    k_column, v_column = k_ref // (2 * BLOCK), v_ref // (2 * BLOCK)
    row_vectors = vector_tables + row * vector_columns
    k_block = tl.load(
        row_vectors + k_column, mask=known & (k_column < vector_columns), other=-1
    ).to(tl.int64)
    v_block = tl.load(
        row_vectors + v_column, mask=known & (v_column < vector_columns), other=-1
    ).to(tl.int64)
    known = known & (k_block >= 0) & (k_block < num_blocks)
    known = known & (v_block >= 0) & (v_block < num_blocks)
    k_at = vectors + ((k_block * 2 * BLOCK + k_ref % (2 * BLOCK)) * DIM)[:, None]
    v_at = vectors + ((v_block * 2 * BLOCK + v_ref % (2 * BLOCK)) * DIM)[:, None]
    turn_at = turns + (tl.abs(distance) * DIM)[:, None] + (dims % HALF)[None, :]
    cos = tl.load(turn_at, mask=known[:, None], other=0.0)
    sin = tl.load(turn_at + HALF, mask=known[:, None], other=0.0)
    negative = (distance < 0)[:, None] != (dims < HALF)[None, :]
    own = tl.load(k_at + dims[None, :], mask=known[:, None], other=0.0)
    pair_at = k_at + ((dims + HALF) % DIM)[None, :]
    pair = tl.load(pair_at, mask=known[:, None], other=0.0)
    k = own * cos + pair * tl.where(negative, -sin, sin)
    return known, k, k_scale, v_at, v_scale
