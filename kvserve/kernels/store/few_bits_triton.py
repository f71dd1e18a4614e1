"""Entries in few bits, on a GPU: turned, rounded, fed back and stored.

The reference is in ``few_levels.py``. Levels and codes are the same, bit for bit: no product is
fused with a sum, and sums have the reference's order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.few_bits import FewBlocks, FewVectors
from kvserve.kernels.store.few_levels import scales
from kvserve.kernels.store.turning_triton import EXACT, turned

if TYPE_CHECKING:
    import triton.language as tl

TOKENS_AT_ONCE = 16  # of a program that rounds; their numbers stay in registers


def store_few_triton(
    blocks: FewBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """A program takes 16 tokens of a head. Slots outside of the cache are left alone."""
    tables, tokens = slots.shape
    heads, dim = tables * blocks.heads, blocks.dim
    check_head_dim(key, value)
    for new in (key, value):
        if new.shape != (tokens, heads, dim) or not new[:1].is_contiguous():
            raise ValueError(
                f"[{tokens}, {heads}, {dim}] with contiguous tokens expected, got "
                f"{list(new.shape)}, strides {list(new.stride())}"
            )
    mean, feedback, order = blocks.layers[layer].shaping
    slots, parts = slots.contiguous(), -(-tokens // TOKENS_AT_ONCE)
    # Of each program: its numbers, channel by channel, and the levels of these.
    shape = parts, heads, dim, TOKENS_AT_ONCE
    numbers = torch.empty(shape, dtype=torch.float32, device=key.device)
    levels = torch.empty(shape, dtype=torch.uint8, device=key.device)
    shaped = (mean, feedback, order) if feedback is not None and order is not None else (mean,) * 3
    for held, new in zip(reversed(blocks.layer(layer)), (value, key), strict=True):
        _store_few.launch(
            (parts, heads),
            *(new, numbers, levels, *shaped, scales_on(key.device), held.tiles, slots),
            *(tokens, new.stride(0), len(held.tiles) * blocks.block_size),
            *(*held.tiles.stride()[:3], held.at, held.codes_at, held.factor, dim**-0.5),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            **form_of(held),
            TOKENS=TOKENS_AT_ONCE,
            SHAPED=held.of_keys and feedback is not None,
            **EXACT,
        )


def form_of(held: FewVectors) -> dict[str, int | bool]:
    """Constants of kernels."""
    width = held.form.strips(held.dim)[1]
    return {"DIM": held.dim, "BITS": held.form.bits, "WIDTH": width, "KEYS": held.of_keys}


@cache
def scales_on(device: torch.device) -> Tensor:
    return scales().to(device)


@Helper
def inside(strip, byte, entry, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Where in a tile a byte of a strip of an entry is, from the first strip on."""
    if KEYS:
        at = byte // 4 * 64 + entry * 4 + byte % 4
    else:
        at = entry // 4 * (4 * WIDTH) + byte * 4 + entry % 4
    return strip * (16 * WIDTH) + at


@Helper
def code_of(total, DIM: tl.constexpr):
    """The codes of vectors whose squares add up to ``total``."""
    bits = tl.div_rn(total, tl.full(total.shape, DIM, tl.float32)).to(tl.int32, bitcast=True)
    mantissa = (bits & 0x7FFFFF | 0x3F800000).to(tl.float32, bitcast=True)
    code = ((bits >> 23 & 255) - 127) * 8 + 128
    for k in tl.static_range(1, 9):
        code += (mantissa >= 2 ** ((2 * k - 1) / 16)).to(tl.int32)
    return tl.minimum(tl.maximum(code, 0), 255)


@Helper
def level_of(x, inverse, BITS: tl.constexpr):
    """Levels of numbers, by one over their steps; of what is no number the least."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    steps = tl.floor(x * inverse) + HALF
    steps = tl.where(steps == steps, steps, 0.0)
    return tl.minimum(tl.maximum(steps, 0.0), 2.0 * HALF - 1.0)


@Helper
def byte_of(levels, strip: tl.constexpr, BITS: tl.constexpr):
    """Bytes [N, W] of a strip, of levels by field [N, F, W]."""
    field = tl.arange(0, levels.shape[1])[None, :, None]
    if BITS == 3:
        whole = tl.where(field // 2 == strip, levels << field % 2 * 3, 0)
        if strip < 2:
            rest = tl.where(field == 6 + strip, (levels & 3) << 6, 0)
        else:
            rest = tl.where(field >= 6, levels >> 2 << 13 - field, 0)
        levels = tl.where(field < 6, whole, rest)
    else:
        levels = levels << field * BITS
    return tl.sum(levels, axis=1).to(tl.uint8)


@Kernel
def _store_few(
    x,
    numbers,
    levels,
    mean,
    feedback,
    order,
    scales,
    tiles,
    slots,
    tokens,
    token_stride,
    num_slots,
    block_stride,
    head_stride,
    tile_stride,
    levels_at,
    codes_at,
    factor,
    shrink,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    SHAPED: tl.constexpr,
):
    head, dims, own = tl.program_id(1), tl.arange(0, DIM)[None, :], tl.arange(0, TOKENS)
    token = tl.program_id(0) * TOKENS + own
    at = x + (token.to(tl.int64) * token_stride)[:, None] + head * DIM + dims
    wanted = tl.load(at, mask=(token < tokens)[:, None], other=0.0).to(tl.float32)
    if KEYS:
        wanted -= tl.load(mean + head * DIM + dims)
    wanted = turned(wanted, shrink, DIM)
    program = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * (TOKENS * DIM)
    numbers += program
    levels += program
    tl.store(numbers + dims * TOKENS + own[:, None], wanted)
    tl.debug_barrier()
    total = tl.zeros([TOKENS], tl.float32)
    for channel in range(DIM):  # one after the other: sums of another order are others
        number = tl.load(numbers + channel * TOKENS + own)
        total += number * number
    code = code_of(total, DIM)
    step = tl.load(scales + code) * factor
    inverse = tl.div_rn(tl.full([TOKENS], 1.0, tl.float32), step)
    if SHAPED:
        channels = tl.load(order + head * DIM + dims)
        wanted = tl.load(numbers + channels * TOKENS + own[:, None])
        left, rounded = wanted, tl.zeros([TOKENS, DIM], tl.float32)
        rows = feedback + head * (DIM * DIM) + dims
        for turn in range(DIM):
            last = DIM - 1 - turn
            mine = dims == last
            now = tl.sum(tl.where(mine, left, 0.0), axis=1)
            level = level_of(now, inverse, BITS)
            goal = tl.sum(tl.where(mine, wanted, 0.0), axis=1)
            error = (level - ((1 << (BITS - 1)) - 0.5)) * step - goal
            rounded = tl.where(mine, level[:, None], rounded)
            left = tl.where(dims < last, left - tl.load(rows + last * DIM) * error[:, None], left)
        tl.store(levels + channels * TOKENS + own[:, None], rounded.to(tl.uint8))
    else:
        rounded = level_of(wanted, inverse[:, None], BITS)
        tl.store(levels + dims * TOKENS + own[:, None], rounded.to(tl.uint8))
    tl.debug_barrier()
    slot = tl.load(slots + head // HEADS * tokens + token, mask=token < tokens, other=-1)
    real = (slot >= 0) & (slot < num_slots)
    entry = (slot % 16).to(tl.int32)
    tile = tiles + slot // BLOCK * block_stride + head % HEADS * head_stride
    tile += slot % BLOCK // 16 * tile_stride
    field, byte = tl.arange(0, DIM // WIDTH)[None, :, None], tl.arange(0, WIDTH)
    by_field = (field * WIDTH + byte[None, None, :]) * TOKENS + own[:, None, None]
    found = tl.load(levels + by_field).to(tl.int32)
    for strip in tl.static_range(3 if BITS == 3 else 1):
        place = inside(strip, byte[None, :], entry[:, None], WIDTH, KEYS)
        to = tile[:, None] + levels_at + place
        tl.store(to, byte_of(found, strip, BITS), mask=real[:, None])
    tl.store(tile + codes_at + entry, code.to(tl.uint8), mask=real)


@Helper
def levels_at(
    first, entry, DIM: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr
):
    """Levels [N, DIM] of entries ``entry [N]`` of tiles, whose strips are from ``first [N]`` on."""
    byte, entry = tl.arange(0, WIDTH)[None, :], entry[:, None]
    a = tl.load(first[:, None] + inside(0, byte, entry, WIDTH, KEYS)).to(tl.int32)
    b, c = a, a
    if BITS == 3:
        b = tl.load(first[:, None] + inside(1, byte, entry, WIDTH, KEYS)).to(tl.int32)
        c = tl.load(first[:, None] + inside(2, byte, entry, WIDTH, KEYS)).to(tl.int32)
    return some_fields(a, b, c, 0, DIM // WIDTH, BITS)


@Helper
def some_fields(a, b, c, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Fields of bytes of one strip, or of three."""
    if COUNT > 1:
        left = some_fields(a, b, c, FIRST, COUNT // 2, BITS)
        right = some_fields(a, b, c, FIRST + COUNT // 2, COUNT // 2, BITS)
        found = tl.join(left, right).permute(0, 2, 1).reshape(left.shape[0], 2 * left.shape[1])
    elif BITS != 3:
        found = a >> FIRST * BITS & (1 << BITS) - 1
    elif FIRST == 6:
        found = a >> 6 | c >> 5 & 4
    elif FIRST == 7:
        found = b >> 6 | c >> 4 & 4
    else:
        found = (a if FIRST < 2 else b if FIRST < 4 else c) >> FIRST % 2 * 3 & 7
    return found
