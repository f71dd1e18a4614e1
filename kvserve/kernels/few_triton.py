"""Entries in few bits, on a GPU: turned, rounded, fed back and stored; read as numbers; moved.

The references are in ``few_bits.py`` and ``turning.py``. Levels and codes are the same, bit for bit:
no product is fused with a sum, and sums have the references' order.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.few_bits import FewBlocks, FewVectors, scales

if TYPE_CHECKING:
    import triton.language as tl

_TOKENS = 16  # of a program that rounds; their numbers stay in registers
_EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


def turn_triton(x: Tensor, mean: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x: [T, heads, D], heads dense. A program takes 16 heads."""
    tokens, heads, dim = x.shape
    check_head_dim(x)
    if x.stride(1) != dim:
        raise ValueError(f"turn_heads: heads of {list(x.shape)} are not dense: {x.stride()}")
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    _turn_heads.launch(
        (-(-tokens * heads // _TOKENS),),
        *(out, x, x if mean is None else mean, tokens * heads, heads, x.stride(0), dim**-0.5),
        DIM=dim,
        ROWS=_TOKENS,
        MEAN=mean is not None,
        **_EXACT,
    )
    return out


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
    slots, parts = slots.contiguous(), -(-tokens // _TOKENS)
    # Of each program: its numbers, channel by channel, and the levels of these.
    numbers = torch.empty(2 * parts * heads * _TOKENS * dim, dtype=torch.float32, device=key.device)
    levels = torch.empty(numbers.shape, dtype=torch.uint8, device=key.device)
    shaped = (mean, feedback, order) if feedback is not None and order is not None else (mean,) * 3
    for held, new, at in zip(
        blocks.layer(layer), (key, value), (0, len(numbers) // 2), strict=True
    ):
        _store_few.launch(
            (parts, heads),
            *(new, numbers[at:], levels[at:], *shaped, _scales(key.device), held.tiles, slots),
            *(tokens, new.stride(0), len(held.tiles) * blocks.block_size),
            *(*held.tiles.stride()[:3], held.at, held.codes_at, held.factor, dim**-0.5),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            **_form(held),
            TOKENS=_TOKENS,
            SHAPED=held.of_keys and feedback is not None,
            **_EXACT,
        )


def gather_few_triton(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """One launch for layers of equal bits. Entries of slots outside of the cache are 0."""
    out = torch.empty(*slots.shape, blocks.dim, dtype=dtype, device=slots.device)
    check_head_dim(out)
    slots, length = slots.contiguous(), slots.shape[2]
    for some in blocks.alike(tuple(layers)):
        held = blocks.layer(some.layer)[int(values)]
        _gather_few.launch(
            (len(some.places) * slots.shape[1], -(-length // _TOKENS)),
            *(out, blocks.pool, some.means, some.places, some.starts, _scales(slots.device), slots),
            *(length, slots.shape[1], len(held.tiles) * blocks.block_size),
            *(*held.tiles.stride()[:3], held.at, held.codes_at, held.factor, blocks.dim**-0.5),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            **_form(held),
            TOKENS=_TOKENS,
            **_EXACT,
        )
    return out


def move_few_triton(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    src, dst, length = src.contiguous(), dst.contiguous(), src.shape[-1] // runs
    for some in blocks.alike(tuple(layers)):
        keys, values = blocks.layer(some.layer)
        (strips, width), (more, v_width) = (x.form.strips(blocks.dim) for x in (keys, values))
        _move_few.launch(
            (len(some.places) * src.shape[1], runs),
            *(blocks.pool, some.places, some.starts, src, dst, length, src.shape[1]),
            *(len(keys.tiles) * blocks.block_size, *keys.tiles.stride()[:3]),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            TILE=64,
            KEY_BYTES=strips * width,
            KEY_WIDTH=width,
            VALUE_BYTES=more * v_width,
            VALUE_WIDTH=v_width,
            SPAN=1 << (max(strips * width, more * v_width) - 1).bit_length(),
            num_warps=4,
        )


def _form(held: FewVectors) -> dict[str, int | bool]:
    """Constants of kernels."""
    width = held.form.strips(held.dim)[1]
    return {"DIM": held.dim, "BITS": held.form.bits, "WIDTH": width, "KEYS": held.of_keys}


@cache
def _scales(device: torch.device) -> Tensor:
    return scales().to(device)


@Helper
def turned(x, shrink, DIM: tl.constexpr):
    """H x of vectors [N, DIM]: pairs of neighbours, neighbouring pairs, and so on."""
    channel = tl.arange(0, DIM)[None, :] + tl.zeros_like(x).to(tl.int32)
    for i in tl.static_range(8):
        if 1 << i < DIM:
            other = tl.gather(x, channel ^ (1 << i), 1)
            x = tl.where((channel >> i) % 2 == 0, x + other, other - x)
    return x * shrink


@Helper
def inside(strip, byte, entry, WIDTH: tl.constexpr, KEYS: tl.constexpr):
    """Where in a tile a byte of a strip of an entry is, from the first strip on."""
    if KEYS:
        at = byte // 4 * 64 + entry * 4 + byte % 4
    else:
        at = entry // 4 * (4 * WIDTH) + byte * 4 + entry % 4
    return strip * (16 * WIDTH) + at


@Helper
def levels_at(
    first,
    entry,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Levels [N, DIM] of entries ``entry [N]`` of tiles, whose strips are from ``first [N]`` on."""
    field, byte = tl.arange(0, DIM)[None, :] // WIDTH, tl.arange(0, DIM)[None, :] % WIDTH
    first, entry = first[:, None], entry[:, None]
    if BITS == 3:
        last = field >= 6
        strip, shift = tl.where(last, field - 6, field // 2), tl.where(last, 6, field % 2 * 3)
        found = tl.load(first + inside(strip, byte, entry, WIDTH, KEYS)).to(tl.int32) >> shift
        top = tl.load(first + inside(2, byte, entry, WIDTH, KEYS)).to(tl.int32)
        top = top >> tl.where(field == 6, 5, 4) & 4
        found = tl.where(last, found & 3 | top, found & 7)
    else:
        found = tl.load(first + inside(0, byte, entry, WIDTH, KEYS)).to(tl.int32)
        found = found >> field * BITS & (1 << BITS) - 1
    return found


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
def _turn_heads(
    out,
    x,
    mean,
    rows,
    heads,
    token_stride,
    shrink,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MEAN: tl.constexpr,
):
    row, dims = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)[None, :]
    real, token, head = (row < rows)[:, None], (row // heads).to(tl.int64), row % heads
    at = (token * token_stride + head * DIM)[:, None] + dims
    numbers = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if MEAN:
        numbers -= tl.load(mean + (head * DIM)[:, None] + dims)
    numbers = turned(numbers, shrink, DIM).to(out.dtype.element_ty)
    tl.store(out + (row.to(tl.int64) * DIM)[:, None] + dims, numbers, mask=real)


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


@Kernel
def _gather_few(
    out,
    pool,
    means,
    places,
    starts,
    scales,
    slots,
    length,
    kv_heads,
    num_slots,
    block_stride,
    head_stride,
    tile_stride,
    strips_at,
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
):
    head, dims = tl.program_id(0) % kv_heads, tl.arange(0, DIM)[None, :]
    lane = tl.load(places + tl.program_id(0) // kv_heads) * kv_heads + head
    base = tl.load(starts + tl.program_id(0) // kv_heads) + head % HEADS * head_stride
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wanted, row = place < length, lane * length + place
    slot = tl.load(slots + row, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    slot = tl.where(known, slot, 0)
    entry = (slot % 16).to(tl.int32)
    tile = pool + base + slot // BLOCK * block_stride + slot % BLOCK // 16 * tile_stride
    level = levels_at(tile + strips_at, entry, DIM, BITS, WIDTH, KEYS).to(tl.float32)
    step = tl.load(scales + tl.load(tile + codes_at + entry).to(tl.int32)) * factor
    numbers = turned((level - ((1 << (BITS - 1)) - 0.5)) * step[:, None], shrink, DIM)
    if KEYS:
        numbers += tl.load(means + lane * DIM + dims)
    numbers = tl.where(known[:, None], numbers, 0.0).to(out.dtype.element_ty)
    tl.store(out + (row * DIM)[:, None] + dims, numbers, mask=wanted[:, None])


@Helper
def bytes_at(
    entry, BYTES: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, KEYS: tl.constexpr
):
    """Where in a tile the bytes of entries ``[N]`` are, [N, SPAN], from its first strip on."""
    byte = tl.arange(0, SPAN)[None, :]
    return inside(byte // WIDTH, byte % WIDTH, entry[:, None], WIDTH, KEYS)


@Kernel
def _move_few(
    pool,
    places,
    starts,
    src,
    dst,
    length,
    kv_heads,
    num_slots,
    block_stride,
    head_stride,
    tile_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    head, byte = tl.program_id(0) % kv_heads, tl.arange(0, SPAN)[None, :]
    lane = tl.load(places + tl.program_id(0) // kv_heads) * kv_heads + head
    base = pool + tl.load(starts + tl.program_id(0) // kv_heads) + head % HEADS * head_stride
    first = (lane * tl.num_programs(1) + tl.program_id(1)) * length
    VALUES_AT: tl.constexpr = 16 * KEY_BYTES
    CODES_AT: tl.constexpr = 16 * (KEY_BYTES + VALUE_BYTES)
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        moved = (target >= BLOCK) & (target < num_slots) & (source != target)
        moved = moved & (source >= 0) & (source < num_slots)
        keys, values = moved[:, None] & (byte < KEY_BYTES), moved[:, None] & (byte < VALUE_BYTES)
        was, to = (source % 16).to(tl.int32), (target % 16).to(tl.int32)
        old = base + source // BLOCK * block_stride + source % BLOCK // 16 * tile_stride
        new = base + target // BLOCK * block_stride + target % BLOCK // 16 * tile_stride
        at = bytes_at(was, KEY_BYTES, KEY_WIDTH, SPAN, True)
        key = tl.load(old[:, None] + at, mask=keys)
        at = bytes_at(was, VALUE_BYTES, VALUE_WIDTH, SPAN, False)
        value = tl.load(old[:, None] + VALUES_AT + at, mask=values)
        k_code = tl.load(old + CODES_AT + was, mask=moved)
        v_code = tl.load(old + CODES_AT + 16 + was, mask=moved)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        at = bytes_at(to, KEY_BYTES, KEY_WIDTH, SPAN, True)
        tl.store(new[:, None] + at, key, mask=keys)
        at = bytes_at(to, VALUE_BYTES, VALUE_WIDTH, SPAN, False)
        tl.store(new[:, None] + VALUES_AT + at, value, mask=values)
        tl.store(new + CODES_AT + to, k_code, mask=moved)
        tl.store(new + CODES_AT + 16 + to, v_code, mask=moved)
