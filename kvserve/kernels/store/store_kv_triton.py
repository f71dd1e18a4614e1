"""``store_kv.py`` in Triton, which may rotate keys on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.layer.elementwise import rotate
from kvserve.kernels.layer.elementwise_triton import rotated
from kvserve.kernels.store.store_kv import as_logged, store_kv_torch

if TYPE_CHECKING:
    import triton.language as tl


def store_kv_triton(
    kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """One program per token and row. Slots outside of the cache are left alone."""
    _launch(kv_cache[:, layer, 0], slots, key, kv_cache[:, layer, 1], value)


def store_queries_triton(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """As ``store_kv_triton``."""
    _launch(query_log[:, layer], slots, as_logged(query_log, slots, query))


def rotate_and_store_torch(
    kv_cache: Tensor, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Store one layer's new entries; returns its rotated queries [T, Hq, D].

    qk: [T, Hq + R * Hb, D], queries first; cos, sin: [T, 1, D]; the others as ``store_kv_torch``'s.
    """
    queries = qk.shape[1] - value.shape[1]
    query, key = rotate(qk, cos, sin).split([queries, value.shape[1]], dim=1)
    store_kv_torch(kv_cache, layer, slots, key, value)
    return query


def rotate_and_store_triton(
    kv_cache: Tensor, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """One program per token and KV head. Slots outside of the cache are left alone."""
    num_blocks, _, _, block, heads, dim = kv_cache.shape
    tokens, kv_heads = len(qk), value.shape[1]
    _check_rotated(kv_cache, slots, qk, value, cos, sin)
    group = qk.shape[1] // kv_heads - 1
    out = torch.empty(tokens, group * kv_heads, dim, dtype=qk.dtype, device=qk.device)
    keys = kv_cache[:, layer, 0]
    group_span, half_span = (1 << (n - 1).bit_length() for n in (group, dim // 2))
    _rotate_and_store.launch(
        (tokens, kv_heads),
        *(out, keys, kv_cache[:, layer, 1], slots.contiguous(), qk, value, cos, sin),
        *(*qk.stride()[:2], *value.stride()[:2], num_blocks * block, *keys.stride()[:2]),
        BLOCK=block,
        ROW_HEADS=heads,
        GROUP=group,
        GROUP_SPAN=group_span,
        HALF=dim // 2,
        HALF_SPAN=half_span,
        num_warps=1 if group_span * half_span <= 256 else 4,
        enable_fp_fusion=False,  # as in ``rotate_triton``
    )
    return out


def _check_rotated(
    kv_cache: Tensor, slots: Tensor, qk: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> None:
    heads, dim = kv_cache.shape[4:]
    (rows, tokens), kv_heads = slots.shape, value.shape[1]
    fits = value.shape == (tokens, rows * heads, dim) and qk.shape[::2] == (tokens, dim)
    fits &= qk.shape[1] % kv_heads == 0 and qk.shape[1] > kv_heads and dim % 2 == 0
    fits &= cos.shape == sin.shape == (tokens, 1, dim)
    fits &= {x.dtype for x in (qk, value, cos, sin)} == {kv_cache.dtype}
    dense = qk.stride(-1) == value.stride(-1) == 1 and kv_cache[:1, 0, 0].is_contiguous()
    if not fits or not dense or not cos.is_contiguous() or not sin.is_contiguous():
        raise ValueError(
            f"rotate_and_store: {qk.dtype} {list(qk.shape)}, values {value.dtype} "
            f"{list(value.shape)} and slots {list(slots.shape)}: dense rows, and operands that fit "
            f"{kv_cache.dtype} {list(kv_cache.shape)}, are needed"
        )


def _launch(
    blocks: Tensor,
    slots: Tensor,
    x: Tensor,
    more_blocks: Tensor | None = None,
    more: Tensor | None = None,
) -> None:
    """blocks: [num_blocks, tokens, Hb, D], a strided view; x: [T, R * Hb, D]; ``more`` likewise."""
    num_blocks, block, heads, dim = blocks.shape
    rows, tokens = slots.shape
    for new in (x, x if more is None else more):
        fits = new.shape == (tokens, rows * heads, dim) and new.dtype == blocks.dtype
        if not fits or not new[:1].is_contiguous():
            raise ValueError(
                f"{blocks.dtype} [{tokens}, {rows * heads}, {dim}] with contiguous tokens expected,"
                f" got {new.dtype} {list(new.shape)}, strides {list(new.stride())}"
            )
    other = x if more is None else more
    _store.launch(
        (tokens, rows),
        *(blocks, blocks if more_blocks is None else more_blocks, slots.contiguous(), x, other),
        *(x.stride(0), other.stride(0), num_blocks * block, *blocks.stride()[:2]),
        BLOCK=block,
        WIDTH=heads * dim,
        SPAN=1 << (heads * dim - 1).bit_length(),
        BOTH=more is not None,
        num_warps=4 if heads * dim >= 1024 else 1,
    )


@Kernel
def _store(
    blocks,
    more_blocks,
    slots,
    x,
    more,
    x_stride,
    more_stride,
    num_slots,
    block_stride,
    entry_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BOTH: tl.constexpr,
):
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row * tl.num_programs(0) + token)
    numbers = tl.arange(0, SPAN)
    mask = (numbers < WIDTH) & (slot >= 0) & (slot < num_slots)
    place = slot // BLOCK * block_stride + slot % BLOCK * entry_stride + numbers
    new = row * WIDTH + numbers
    tl.store(blocks + place, tl.load(x + token * x_stride + new, mask=mask), mask=mask)
    if BOTH:
        values = tl.load(more + token * more_stride + new, mask=mask)
        tl.store(more_blocks + place, values, mask=mask)


@Kernel
def _rotate_and_store(
    out,
    keys,
    values,
    slots,
    qk,
    v,
    cos,
    sin,
    token_stride,
    head_stride,
    v_token_stride,
    v_head_stride,
    num_slots,
    block_stride,
    entry_stride,
    BLOCK: tl.constexpr,
    ROW_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_SPAN: tl.constexpr,
    HALF: tl.constexpr,
    HALF_SPAN: tl.constexpr,
):
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    slot = tl.load(slots + kv_head // ROW_HEADS * tl.num_programs(0) + token)
    place = tl.arange(0, HALF_SPAN)[None]
    there = place < HALF
    angles = token * 2 * HALF + place
    head = tl.arange(0, GROUP_SPAN)[:, None]
    mask, number = (head < GROUP) & there, kv_head * GROUP + head
    source = qk + token * token_stride + number * head_stride + place
    left, right = rotated(source, cos + angles, sin + angles, mask, there, HALF)
    target = out + (token * kv_heads * GROUP + number) * 2 * HALF + place
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)
    known = there & (slot >= 0) & (slot < num_slots)
    entry = slot // BLOCK * block_stride + slot % BLOCK * entry_stride
    entry += kv_head % ROW_HEADS * 2 * HALF + place
    source = qk + token * token_stride + (kv_heads * GROUP + kv_head) * head_stride + place
    left, right = rotated(source, cos + angles, sin + angles, known, there, HALF)
    tl.store(keys + entry, left, mask=known)
    tl.store(keys + entry + HALF, right, mask=known)
    source = v + token * v_token_stride + kv_head * v_head_stride + place
    tl.store(values + entry, tl.load(source, mask=known), mask=known)
    tl.store(values + entry + HALF, tl.load(source + HALF, mask=known), mask=known)
