"""Entries held as levels, on a GPU: rounded and stored, read as numbers, moved as they are.

The references are in ``quantized_entries.py``. Scales and lows are handled as 16-bit integers, so
that every device rounds them as the references do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.quantized_entries import QuantizedBlocks, QuantizedKernels, QuantizedVectors

if TYPE_CHECKING:
    import triton.language as tl

FORMS = {"int8": 1, "int4": 2, "fp8": 3}
"""The constant ``FORM`` of kernels, for each form."""


def form_of(held: Tensor | QuantizedVectors) -> int:
    """``FORM`` of keys or values; 0 of numbers."""
    return 0 if isinstance(held, Tensor) else FORMS[held.form.name]


def parts_of(held: QuantizedVectors) -> tuple[Tensor, Tensor, Tensor]:
    """Levels, and scales and lows as int16; without lows, the scales again."""
    levels = held.levels.view(torch.int8) if held.form.name == "int8" else held.levels
    scale = held.scale.view(torch.int16)
    return levels, scale, scale if held.low is None else held.low.view(torch.int16)


def store_quantized_triton(
    blocks: QuantizedBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """One program per token and head. Slots outside of the cache are left alone."""
    num_blocks, _, block, heads, dim = blocks.keys.shape
    rows, tokens = slots.shape
    check_head_dim(key, value)
    for new in (key, value):
        if new.shape != (tokens, rows * heads, dim) or not new[:1].is_contiguous():
            raise ValueError(
                f"[{tokens}, {rows * heads}, {dim}] with contiguous tokens expected, got "
                f"{list(new.shape)}, strides {list(new.stride())}"
            )
    keys, values = blocks.layer(layer)
    _store_levels.launch(
        (tokens, rows * heads),
        key,
        value,
        *parts_of(keys),
        *parts_of(values),
        slots.contiguous(),
        tokens,
        key.stride(0),
        value.stride(0),
        num_blocks * block,
        blocks.pool.stride(0),
        blocks.lane_bytes,
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        KEY=form_of(keys),
        VALUE=form_of(values),
        num_warps=1,
    )


def gather_quantized_triton(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """Entries of slots outside of the cache are 0."""
    held = blocks.values if values else blocks.keys
    num_blocks, layers, block, heads, dim = held.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    out = torch.empty(*slots.shape, dim, dtype=dtype, device=slots.device)
    check_head_dim(out)
    tile = max(16, 4096 // dim)
    _gather_levels.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        out,
        *parts_of(held),
        slots.contiguous(),
        layer_ids,
        slots.shape[2],
        slots.shape[1],
        layers,
        num_blocks * block,
        *blocks.pool.stride()[:2],
        blocks.lane_bytes,
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=tile,
        FORM=form_of(held),
        num_warps=4,
    )
    return out


def move_quantized_triton(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    num_blocks, layers, block, heads, dim = blocks.keys.shape
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    widths = (held.levels.shape[-1] for held in (blocks.keys, blocks.values))
    _move_levels.launch(
        (src.shape[0] * src.shape[1], runs),
        *parts_of(blocks.keys),
        *parts_of(blocks.values),
        src.contiguous(),
        dst.contiguous(),
        src.shape[-1] // runs,
        src.shape[1],
        layers,
        num_blocks * block,
        *blocks.pool.stride()[:2],
        blocks.lane_bytes,
        BLOCK=block,
        HEADS=heads,
        TILE=max(16, 4096 // dim),
        LOW=blocks.values.low is not None,
        **dict(zip(("KEY", "VALUE"), widths, strict=True)),
        num_warps=4,
    )


TRITON = QuantizedKernels(store_quantized_triton, gather_quantized_triton, move_quantized_triton)


@Helper
def levels_as_floats(levels, FORM: tl.constexpr, upper):
    """Levels of a byte each as float16; of int4 the upper ones of bytes where ``upper`` is 1."""
    if FORM == 2:
        digits = ((levels.to(tl.int16) >> (upper * 4)) & 15) | 0x6400
        floats = digits.to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    elif FORM == 3:
        floats = levels.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        digits = levels.to(tl.int16) + 0x6480
        floats = digits.to(tl.float16, bitcast=True) - 1152.0
    return floats


@Helper
def as_half(x):
    """Vectors [N, D] as float16 (float32 stays), each divided by a power of two; and these [N]."""
    most = tl.max(tl.abs(x.to(tl.float32)), axis=1)
    unit = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.where(unit > 0, unit, 1.0)
    small = x.to(tl.float32) / unit[:, None]
    if x.dtype != tl.float32:
        small = small.to(tl.float16)
    return small, unit


@Helper
def bfloat16_as_float(bits):
    """int16 bits of bfloat16 numbers -> float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@Helper
def bfloat16_above(x):
    """int16 bits of the least bfloat16 numbers that are not below ``x``."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits, bits + 0xFFFF) >> 16).to(tl.int16)


@Helper
def nearest(x, least, most):
    """Whole numbers in ``[least, most]``, ties to even."""
    return tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, least), most)  # 1.5 * 2^23


@Helper
def e4m3_bits(x):
    """The e4m3 bits of numbers up to 448, rounded to nearest, ties to even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2 ** -9
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return tl.where(size < 0.015625, small, normal) | sign


@Helper
def store_vector(
    x,
    levels,
    scales,
    lows,
    at,
    entry,
    real,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
):
    """Round the vector at ``x`` and write it as entry ``entry`` of the lane ``at`` bytes on."""
    if FORM == 2:
        half = tl.arange(0, DIM // 2)
        lower, upper = tl.load(x + half).to(tl.float32), tl.load(x + DIM // 2 + half).to(tl.float32)
        least = tl.minimum(tl.min(lower, axis=0), tl.min(upper, axis=0))
        # Negated by its sign bit: Triton's minus makes 0 of 0, not -0.
        opposite = (least.to(tl.int32, bitcast=True) ^ -2147483648).to(tl.float32, bitcast=True)
        low_bits = bfloat16_above(opposite)
        low = -bfloat16_as_float(low_bits)
        most = tl.maximum(tl.max(lower, axis=0), tl.max(upper, axis=0))
        scale_bits = bfloat16_above(tl.div_rn(most - low, 15.0))
        scale = bfloat16_as_float(scale_bits)
        divisor = tl.where(scale > 0, scale, 1.0)
        one = nearest(tl.div_rn(lower - low, divisor), 0.0, 15.0).to(tl.int32)
        other = nearest(tl.div_rn(upper - low, divisor), 0.0, 15.0).to(tl.int32)
        tl.store(levels + at + entry * WIDTH + half, (one | other << 4).to(tl.uint8), mask=real)
        tl.store(lows + at // 2 + entry, (low_bits ^ -32768).to(tl.int16), mask=real)
    else:
        dims = tl.arange(0, DIM)
        numbers = tl.load(x + dims).to(tl.float32)
        END: tl.constexpr = 448.0 if FORM == 3 else 127.0
        scale_bits = bfloat16_above(tl.div_rn(tl.max(tl.abs(numbers), axis=0), END))
        scale = bfloat16_as_float(scale_bits)
        numbers = tl.div_rn(numbers, tl.where(scale > 0, scale, 1.0))
        if FORM == 3:
            rounded = e4m3_bits(numbers).to(tl.uint8)
        else:
            rounded = nearest(numbers, -127.0, 127.0).to(tl.int8)
        tl.store(levels + at + entry * WIDTH + dims, rounded, mask=real)
    tl.store(scales + at // 2 + entry, scale_bits, mask=real)


@Kernel
def _store_levels(
    key,
    value,
    key_levels,
    key_scales,
    key_lows,
    value_levels,
    value_scales,
    value_lows,
    slots,
    tokens,
    key_stride,
    value_stride,
    num_slots,
    block_stride,
    lane_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + head // HEADS * tokens + token)
    real = (slot >= 0) & (slot < num_slots)
    at = slot // BLOCK * block_stride + head % HEADS * lane_stride
    entry = slot % BLOCK
    K_WIDTH: tl.constexpr = DIM // 2 if KEY == 2 else DIM
    V_WIDTH: tl.constexpr = DIM // 2 if VALUE == 2 else DIM
    k, v = key + token * key_stride + head * DIM, value + token * value_stride + head * DIM
    store_vector(k, key_levels, key_scales, key_lows, at, entry, real, K_WIDTH, DIM, KEY)
    store_vector(v, value_levels, value_scales, value_lows, at, entry, real, V_WIDTH, DIM, VALUE)


@Kernel
def _gather_levels(
    out,
    levels,
    scales,
    lows,
    slots,
    layer_ids,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    lane_stride,
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
    dims = tl.arange(0, DIM)
    WIDTH: tl.constexpr = DIM // 2 if FORM == 2 else DIM
    base = layer.to(tl.int64) * layer_stride + lane % kv_heads % HEADS * lane_stride
    base = slot // BLOCK * block_stride + base
    byte = (base + slot % BLOCK * WIDTH)[:, None] + (dims % WIDTH)[None, :]
    held = tl.load(levels + byte, mask=known[:, None], other=0)
    numbers = levels_as_floats(held, FORM, (dims // WIDTH)[None, :])
    at = base // 2 + slot % BLOCK
    numbers *= bfloat16_as_float(tl.load(scales + at, mask=known, other=0))[:, None]
    if FORM == 2:
        numbers += bfloat16_as_float(tl.load(lows + at, mask=known, other=0))[:, None]
    to = out + (first + place)[:, None] * DIM + dims[None, :]
    tl.store(to, numbers.to(out.dtype.element_ty), mask=wanted[:, None])


@Kernel
def _move_levels(
    key_levels,
    key_scales,
    key_lows,
    value_levels,
    value_scales,
    value_lows,
    src,
    dst,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    lane_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    LOW: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    lane = tl.program_id(0)
    first = (lane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * length
    base = (lane // kv_heads % layers).to(tl.int64) * layer_stride
    base += lane % kv_heads % HEADS * lane_stride
    k_byte, v_byte = tl.arange(0, KEY)[None, :], tl.arange(0, VALUE)[None, :]
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        wanted = (target >= BLOCK) & (target < num_slots) & (source != target)
        moves = wanted & (source >= 0) & (source < num_slots)
        old, new = base + source // BLOCK * block_stride, base + target // BLOCK * block_stride
        old_at, new_at = source % BLOCK, target % BLOCK
        every = moves[:, None]
        keys = tl.load(key_levels + (old + old_at * KEY)[:, None] + k_byte, mask=every)
        values = tl.load(value_levels + (old + old_at * VALUE)[:, None] + v_byte, mask=every)
        k_scale = tl.load(key_scales + old // 2 + old_at, mask=moves)
        v_scale = tl.load(value_scales + old // 2 + old_at, mask=moves)
        if LOW:
            v_low = tl.load(value_lows + old // 2 + old_at, mask=moves)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        tl.store(key_levels + (new + new_at * KEY)[:, None] + k_byte, keys, mask=every)
        tl.store(value_levels + (new + new_at * VALUE)[:, None] + v_byte, values, mask=every)
        tl.store(key_scales + new // 2 + new_at, k_scale, mask=moves)
        tl.store(value_scales + new // 2 + new_at, v_scale, mask=moves)
        if LOW:
            tl.store(value_lows + new // 2 + new_at, v_low, mask=moves)
