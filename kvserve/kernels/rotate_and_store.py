"""Rotate queries and keys, and write the latter and their values to their slots, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_slots
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.elementwise import rotate, turned
from kvserve.kernels.store_kv import store_kv_torch

if TYPE_CHECKING:
    import triton.language as tl


def rotate_and_store_torch(
    kv_cache: Tensor, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Store one layer's new entries; returns its rotated queries [T, Hq, D].

    qk: [T, Hq + R * Hb, D], queries first; cos, sin: [T, 1, D]; the others as ``store_kv``'s.
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
    check_slots(slots, num_blocks, block)
    _check(kv_cache, slots, qk, value, cos, sin)
    group = qk.shape[1] // kv_heads - 1
    out = torch.empty(tokens, group * kv_heads, dim, dtype=qk.dtype, device=qk.device)
    keys = kv_cache[:, layer, 0]
    group_span, half_span = (1 << (n - 1).bit_length() for n in (group, dim // 2))
    _rotate_and_store.launch(
        (tokens, kv_heads),
        out,
        keys,
        kv_cache[:, layer, 1],
        slots.contiguous(),
        qk,
        value,
        cos,
        sin,
        *qk.stride()[:2],
        *value.stride()[:2],
        num_blocks * block,
        *keys.stride()[:2],
        BLOCK=block,
        ROW_HEADS=heads,
        GROUP=group,
        GROUP_SPAN=group_span,
        HALF=dim // 2,
        HALF_SPAN=half_span,
        num_warps=1 if group_span * half_span <= 256 else 4,
    )
    return out


def _check(
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
    left, right = turned(source, cos + angles, sin + angles, mask, there, HALF)
    target = out + (token * kv_heads * GROUP + number) * 2 * HALF + place
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)
    known = there & (slot >= 0) & (slot < num_slots)
    entry = slot // BLOCK * block_stride + slot % BLOCK * entry_stride
    entry += kv_head % ROW_HEADS * 2 * HALF + place
    source = qk + token * token_stride + (kv_heads * GROUP + kv_head) * head_stride + place
    left, right = turned(source, cos + angles, sin + angles, known, there, HALF)
    tl.store(keys + entry, left, mask=known)
    tl.store(keys + entry + HALF, right, mask=known)
    source = v + token * v_token_stride + kv_head * v_head_stride + place
    tl.store(values + entry, tl.load(source, mask=known), mask=known)
    tl.store(values + entry + HALF, tl.load(source + HALF, mask=known), mask=known)
