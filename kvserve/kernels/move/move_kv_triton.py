"""``move_kv.py`` in Triton, of levels too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.move.move_kv import Vectors
from kvserve.kernels.store.entries import told_of
from kvserve.kernels.store.quantized_entries_triton import bfloat16_as_float

if TYPE_CHECKING:
    import triton.language as tl


def gather_kv_triton(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """Those of slots outside of the cache are 0."""
    return gather_triton(kv_cache[:, :, int(values)], slots, layer_ids)


def gather_triton(
    held: Vectors, slots: Tensor, layer_ids: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers or levels [num_blocks, Lb, tokens, Hb, D], a strided view -> [L', H, S, D]. Those of
    slots outside of the cache are 0."""
    dtype = dtype or (held.dtype if isinstance(held, Tensor) else torch.float32)
    num_blocks, layers, block, heads, dim = held.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    out = torch.empty(*slots.shape, dim, dtype=dtype, device=slots.device)
    check_head_dim(held if isinstance(held, Tensor) else out)
    told = told_of(held)
    tile = max(16, 4096 // dim)
    _gather.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        *(out, told.stored, told.steps, told.lows, slots.contiguous(), layer_ids),
        *(slots.shape[2], slots.shape[1], layers, num_blocks * block, *told.strides),
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=tile,
        FORM=told.form,
        num_warps=4,
    )
    return out


def move_kv_triton(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    check_head_dim(kv_cache)
    move_triton(kv_cache[:, :, 0], kv_cache[:, :, 1], src, dst, runs)


def move_triton(keys: Vectors, values: Vectors, src: Tensor, dst: Tensor, runs: int) -> None:
    """Of numbers or levels [num_blocks, Lb, tokens, Hb, D], strided views."""
    num_blocks, layers, block, heads, dim = keys.shape
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    k, v = told_of(keys), told_of(values)
    _compact.launch(
        (src.shape[0] * src.shape[1], runs),
        *(k.stored, k.steps, v.stored, v.steps, v.lows, src.contiguous(), dst.contiguous()),
        *(src.shape[-1] // runs, src.shape[1], layers, num_blocks * block, *k.strides),
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=max(16, 4096 // dim),
        KEY=k.form,
        VALUE=v.form,
        num_warps=4,
    )


@Kernel
def _gather(
    out,
    stored,
    steps,
    lows,
    slots,
    layer_ids,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    entry_stride,
    head_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    FORM: tl.constexpr,
):
    lane = tl.program_id(0)
    layer = tl.load(layer_ids + lane // kv_heads) % layers
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = place < length
    first = lane.to(tl.int64) * length
    slot = tl.load(slots + first + place, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    dims = tl.arange(0, DIM)[None, :]
    base = layer.to(tl.int64) * layer_stride + lane % kv_heads % HEADS * head_stride
    if FORM == 0:
        entry = base + slot // BLOCK * block_stride + slot % BLOCK * entry_stride
        numbers = tl.load(stored + entry[:, None] + dims, mask=known[:, None], other=0)
    else:
        slot = tl.where(known, slot, 0)
        base = slot // BLOCK * block_stride + base
        entry = slot % BLOCK
        at = base // 2 + entry
        BITS: tl.constexpr = FORM % 16
        WIDTH: tl.constexpr = DIM * BITS // 8
        held = tl.load(stored + (base + entry * WIDTH)[:, None] + dims % WIDTH)
        if FORM >= 32:
            numbers = held.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORM >= 16:
            held = (held >> (dims // WIDTH * BITS).to(tl.uint8)) & ((1 << BITS) - 1)
            numbers = held.to(tl.float32)
        else:
            numbers = held.to(tl.int8, bitcast=True).to(tl.float32)
        numbers *= bfloat16_as_float(tl.load(steps + at))[:, None]
        if FORM % 32 >= 16:
            numbers += bfloat16_as_float(tl.load(lows + at))[:, None]
        numbers = tl.where(known[:, None], numbers, 0.0).to(out.dtype.element_ty)
    tl.store(out + (first + place)[:, None] * DIM + dims, numbers, mask=wanted[:, None])


@Helper
def vectors_of(stored, base, entry, entry_stride, DIM: tl.constexpr, FORM: tl.constexpr):
    """Where vectors ``entry [N]`` of the lanes ``base [N]`` on lie: levels side by side, numbers
    ``entry_stride`` apart."""
    WIDTH: tl.constexpr = DIM * (FORM % 16) // 8 if FORM > 0 else DIM
    first = base + entry * (WIDTH if FORM > 0 else entry_stride)
    return stored + first[:, None] + tl.arange(0, WIDTH)[None, :]


@Kernel
def _compact(
    keys,
    key_steps,
    values,
    value_steps,
    value_lows,
    src,
    dst,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    entry_stride,
    head_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    lane = tl.program_id(0)
    first = (lane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * length
    base = (lane // kv_heads % layers).to(tl.int64) * layer_stride
    base += lane % kv_heads % HEADS * head_stride
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        wanted = (target >= BLOCK) & (target < num_slots) & (source != target)
        moved = wanted & (source >= 0) & (source < num_slots)
        every = moved[:, None]
        old = base + source // BLOCK * block_stride, source % BLOCK
        new = base + target // BLOCK * block_stride, target % BLOCK
        key = tl.load(vectors_of(keys, *old, entry_stride, DIM, KEY), mask=every)
        value = tl.load(vectors_of(values, *old, entry_stride, DIM, VALUE), mask=every)
        was, at = old[0] // 2 + old[1], new[0] // 2 + new[1]
        if KEY > 0:
            k_step = tl.load(key_steps + was, mask=moved)
            v_step = tl.load(value_steps + was, mask=moved)
        if VALUE % 32 >= 16:
            v_low = tl.load(value_lows + was, mask=moved)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        tl.store(vectors_of(keys, *new, entry_stride, DIM, KEY), key, mask=every)
        tl.store(vectors_of(values, *new, entry_stride, DIM, VALUE), value, mask=every)
        if KEY > 0:
            tl.store(key_steps + at, k_step, mask=moved)
            tl.store(value_steps + at, v_step, mask=moved)
        if VALUE % 32 >= 16:
            tl.store(value_lows + at, v_low, mask=moved)
