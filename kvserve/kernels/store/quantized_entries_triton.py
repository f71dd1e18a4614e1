"""Entries held as levels, on a GPU: rounded and stored, and read as numbers by attention.

The references are in ``quantized_entries.py``. Steps and lows are handled as 16-bit integers, so
that every device rounds them as the references do. ``VectorForm.code`` is a constant of kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.entries import told_of
from kvserve.kernels.store.few_bits_triton import levels_at
from kvserve.kernels.store.quantized_entries import QuantizedBlocks

if TYPE_CHECKING:
    import triton.language as tl


def store_levels_triton(
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
    k, v = map(told_of, blocks.layer(layer))
    _store_levels.launch(
        (tokens, rows * heads),
        *(key, value, k.stored, k.steps, v.stored, v.steps, v.lows, slots.contiguous()),
        *(tokens, key.stride(0), value.stride(0), num_blocks * block),
        *(blocks.pool.stride(0), blocks.lane_bytes),
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        KEY=k.form,
        VALUE=v.form,
        num_warps=1,
    )


@Helper
def numbers_at(
    levels,
    byte,
    steps,
    at,
    known,
    log,
    DIM: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The vectors at ``byte [N]`` of ``levels``, whose steps (or codes) are at ``at [N]``, without
    their lows.

    Numbers [N, DIM] of ``dtype``, float16 or float32, in the order of ``channels_of``, and what
    each vector's are multiplied by, float32 [N]. Those that are not ``known`` are finite, times 0.
    """
    unit = tl.load(steps + at, mask=known, other=0)
    if FORM > 64:
        BITS: tl.constexpr = FORM - 64
        unit = tl.exp2(unit.to(tl.float32) * 0.0625 + log)
        found = levels_at(levels + byte, (at % 16).to(tl.int32), DIM, BITS, WIDTH, KEYS)
        found = (found.to(tl.float32) - ((1 << (BITS - 1)) - 0.5)).to(dtype)
    else:
        unit = bfloat16_as_float(unit)
        if FORM >= 32:  # e4m3, the only levels that may be nan
            bytes_at = byte[:, None] + tl.arange(0, DIM)[None, :]
            found = tl.load(levels + bytes_at, mask=known[:, None], other=0)
            found = found.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
        else:
            words = levels.to(tl.pointer_type(tl.int32)) + (byte // 4)[:, None]
            words = tl.load(words + tl.arange(0, DIM * (FORM % 16) // 32)[None, :])
            if FORM < 16:
                # Two numbers are made at once: small ones stand in the last bits of 1024.
                even, odd = words & 0x00FF00FF ^ 0x64806480, words >> 8 & 0x00FF00FF ^ 0x64806480
                found = tl.join(halves_of(even), halves_of(odd)).permute(0, 1, 3, 2) - 1152.0
                found = found.to(dtype)
            else:
                # Of each plane the levels of bytes 0 and 2, 1 and 3: their bits are 2 ** 24 times
                # less as float16.
                number = tl.arange(0, 4)
                found = words[:, :, None] >> (number // 2 * 4 + number % 2 * 8)[None, None, :]
                found = halves_of(found & 0x000F000F).to(dtype) * 32768.0
                unit *= 512.0
            found = found.reshape(byte.shape[0], DIM)
    return found, unit


@Helper
def channels_of(DIM: tl.constexpr, FORM: tl.constexpr):
    """Which channel each number of ``numbers_at`` is: int32 [DIM]."""
    number = tl.arange(0, DIM)
    if (FORM > 0) & (FORM < 32):
        PLANES: tl.constexpr = 8 // (FORM % 16)
        word, plane = number // (4 * PLANES), number // 4 % PLANES
        number = plane * (DIM // PLANES) + word * 4 + number // 2 % 2 + number % 2 * 2
    return number


@Helper
def halves_of(words):
    """Words as two numbers of float16 each: one more dimension."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return both.to(tl.float16, bitcast=True)


@Helper
def power_of_two(x):
    """The largest powers of two up to ``x``, at least 2 ** -100; and one over these."""
    bits = tl.maximum(x, 7.888609052210118e-31).to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@Helper
def as_half(x):
    """Vectors [N, D] as float16 (float32 stays), each divided by a power of two; and these [N]."""
    unit, per_unit = power_of_two(tl.max(tl.abs(x.to(tl.float32)), axis=1))
    small = x.to(tl.float32) * per_unit[:, None]
    if x.dtype != tl.float32:
        small = small.to(tl.float16)
    return small, unit


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
def store_vector(x, levels, steps, lows, at, entry, real, DIM: tl.constexpr, FORM: tl.constexpr):
    """Round the vector at ``x`` and write it as entry ``entry`` of the lane ``at`` bytes on."""
    BITS: tl.constexpr = FORM % 16
    LOW: tl.constexpr = FORM % 32 >= 16
    MOST: tl.constexpr = 448.0 if FORM >= 32 else (1 << (BITS if LOW else BITS - 1)) - 1.0
    WIDTH: tl.constexpr = DIM * BITS // 8
    place = at // 2 + entry
    numbers = tl.load(x + tl.arange(0, DIM)).to(tl.float32)
    if LOW:
        # Negated by its sign bit: Triton's minus makes 0 of 0, not -0.
        opposite = tl.min(numbers, axis=0).to(tl.int32, bitcast=True) ^ -2147483648
        low_bits = bfloat16_above(opposite.to(tl.float32, bitcast=True))
        low = -bfloat16_as_float(low_bits)
        span = tl.max(numbers, axis=0) - low
        numbers -= low
        tl.store(lows + place, (low_bits ^ -32768).to(tl.int16), mask=real)
    else:
        span = tl.max(tl.abs(numbers), axis=0)
    step_bits = bfloat16_above(tl.div_rn(span, MOST))
    tl.store(steps + place, step_bits, mask=real)
    step = bfloat16_as_float(step_bits)
    numbers = tl.div_rn(numbers, tl.full([DIM], 1.0, tl.float32) * tl.where(step > 0, step, 1.0))
    if FORM >= 32:
        rounded = e4m3_bits(numbers)
    else:
        rounded = nearest(numbers, 0.0 if LOW else -MOST, MOST).to(tl.int32)
    if BITS < 8:
        plane = rounded.reshape(8 // BITS, WIDTH)
        rounded = tl.sum(plane << (tl.arange(0, 8 // BITS) * BITS)[:, None], axis=0)
    at_byte = levels + at + entry * WIDTH + tl.arange(0, WIDTH)
    tl.store(at_byte, rounded.to(tl.uint8), mask=real)


@Kernel
def _store_levels(
    key,
    value,
    key_levels,
    key_steps,
    value_levels,
    value_steps,
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
    at = slot // BLOCK * block_stride + head % HEADS * lane_stride, slot % BLOCK, real
    k, v = key + token * key_stride + head * DIM, value + token * value_stride + head * DIM
    store_vector(k, key_levels, key_steps, key_steps, *at, DIM, KEY)
    store_vector(v, value_levels, value_steps, value_lows, *at, DIM, VALUE)


@Helper
def bfloat16_as_float(bits):
    """int16 bits of bfloat16 numbers -> float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
