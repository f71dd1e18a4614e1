"""``int4_log.py`` in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense, check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.int4_log import Int4Queries

if TYPE_CHECKING:
    import triton.language as tl


def store_int4_triton(
    log: Int4Queries, layer: int, slots: Tensor, query: Tensor, shares: Tensor
) -> None:
    """One program per token and row. Slots outside of the log are left alone."""
    num_blocks, _, block, heads, half = log.codes.shape
    rows, tokens = slots.shape
    check_head_dim(query)
    wanted = tokens, rows * heads, 2 * half
    if query.shape != wanted or query.stride(1) != 2 * half:
        shapes = f"queries {list(wanted)} with contiguous tokens expected, got {list(query.shape)}"
        raise ValueError(shapes)
    check_dense("shares", shares, wanted[:2], torch.float32)
    codes, scales = (part[:, layer] for part in log)
    _store_int4.launch(
        (tokens, rows),
        *(codes, scales, slots.contiguous(), query, shares),
        *(query.stride(0), num_blocks * block, *codes.stride()[:2], *scales.stride()[:2]),
        BLOCK=block,
        HEADS=heads,
        SPAN=1 << (heads - 1).bit_length(),
        DIM=2 * half,
        num_warps=4 if heads * half >= 1024 else 1,
        enable_fp_fusion=False,  # the reference rounds the product first
    )


def gather_int4_triton(
    log: Int4Queries, slots: Tensor, layer_ids: Tensor | None = None
) -> Int4Queries:
    """Vectors of slots outside of the log are 0."""
    num_blocks, layers, block, heads, half = log.codes.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    codes = log.codes.new_empty(*slots.shape, half)
    scales = log.scales.new_empty(*slots.shape, 2)
    tile = max(16, 4096 // half)
    _gather_int4.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        *(codes, scales, *log, slots.contiguous(), layer_ids),
        *(slots.shape[2], slots.shape[1], layers, num_blocks * block),
        *(*log.codes.stride()[:3], *log.scales.stride()[:3]),
        BLOCK=block,
        HEADS=heads,
        HALF=half,
        TILE=tile,
        num_warps=4,
    )
    return Int4Queries(codes, scales)


@Helper
def widened(codes):
    """uint8 [ROWS, D / 2] -> the numbers from -7 to 7: int32 [ROWS, D]."""
    wide = codes.to(tl.int32)
    return tl.interleave((wide & 15) - 8, (wide >> 4) - 8)


@Kernel
def _store_int4(
    codes,
    scales,
    slots,
    query,
    shares,
    token_stride,
    num_slots,
    codes_block_stride,
    codes_token_stride,
    scales_block_stride,
    scales_token_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
):
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row * tl.num_programs(0) + token)
    head, dims, pairs = tl.arange(0, SPAN), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    real = (head < HEADS) & (slot >= 0) & (slot < num_slots)
    first = row * HEADS
    at = query + token * token_stride + ((first + head) * DIM)[:, None] + dims[None, :]
    x = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
    log_share = tl.load(
        shares + token * (tl.num_programs(1) * HEADS) + first + head, mask=real, other=0.0
    )
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), 7.0), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    inverse = tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)
    number = tl.floor(x * inverse[:, None] + 0.5)
    number = tl.minimum(tl.maximum(number, -7.0), 7.0).to(tl.int32) + 8
    low, high = tl.split(tl.reshape(number, [SPAN, DIM // 2, 2]))
    block, place = slot // BLOCK, slot % BLOCK
    to = codes + block * codes_block_stride + place * codes_token_stride
    to_at = to + (head * (DIM // 2))[:, None] + pairs[None, :]
    tl.store(to_at, (low | (high << 4)).to(tl.uint8), mask=real[:, None])
    to = scales + block * scales_block_stride + place * scales_token_stride + head * 2
    log_share = tl.minimum(tl.maximum(log_share, -65504.0), 65504.0)
    tl.store(to, scale, mask=real)
    tl.store(to + 1, log_share.to(tl.float16), mask=real)


@Kernel
def _gather_int4(
    codes_out,
    scales_out,
    codes,
    scales,
    slots,
    layer_ids,
    length,
    log_heads,
    layers,
    num_slots,
    codes_block_stride,
    codes_layer_stride,
    codes_token_stride,
    scales_block_stride,
    scales_layer_stride,
    scales_token_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0)
    layer = (tl.load(layer_ids + lane // log_heads) % layers).to(tl.int64)
    head = lane % log_heads % HEADS
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = place < length
    first = lane.to(tl.int64) * length
    slot = tl.load(slots + first + place, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    block, token = slot // BLOCK, slot % BLOCK
    pairs, both = tl.arange(0, HALF)[None, :], tl.arange(0, 2)[None, :]
    old = codes + layer * codes_layer_stride + head * HALF + pairs
    old += (block * codes_block_stride + token * codes_token_stride)[:, None]
    # A code of 8 is 0.
    found = tl.load(old, mask=known[:, None], other=0x88)
    tl.store(codes_out + (first + place)[:, None] * HALF + pairs, found, mask=wanted[:, None])
    old = scales + layer * scales_layer_stride + head * 2 + both
    old += (block * scales_block_stride + token * scales_token_stride)[:, None]
    numbers = tl.load(old, mask=known[:, None], other=0.0)
    tl.store(scales_out + (first + place)[:, None] * 2 + both, numbers, mask=wanted[:, None])
