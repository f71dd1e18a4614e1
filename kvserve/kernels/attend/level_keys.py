"""Products of queries with keys held as levels, for ``decode_levels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper
from kvserve.kernels.store.level_words import (
    beside_each_other,
    bytes_of,
    e4m3_even,
    e4m3_odd,
    masked,
    paired,
)
from kvserve.kernels.store.quantized_entries_triton import power_of_two

if TYPE_CHECKING:
    import triton.language as tl


@Helper
def key_channels(DIM: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Which channel each number of ``key_operand`` is, DIM or more: none."""
    if FORM > 64:
        FIELDS: tl.constexpr = 8 if FORM == 67 else 8 // (FORM - 64)
        EACH: tl.constexpr = max(WIDTH, 32 // FIELDS)
        number = tl.arange(0, FIELDS * EACH)
        field = number // (2 * EACH) * 2 + number // 4 % 2
        byte = number % (2 * EACH) // 8 * 4 + number % 4
        channel = tl.where(byte < WIDTH, field * WIDTH + byte, DIM)
    elif FORM == 40:
        number = tl.arange(0, DIM)
        inside = number % (DIM // 2)
        channel = inside // 2 * 4 + inside % 2 * 2 + number // (DIM // 2)
    else:
        channel = tl.arange(0, max(DIM, 32))
    return channel


@Helper
def query_operand(
    q,
    head_stride,
    query,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """The queries as keys are multiplied by them, sums of their numbers, and units of these [Q]."""
    dims = tl.arange(0, DIM)[None, :]
    x = tl.load(q + query[:, None] * head_stride + dims, mask=(query < GROUP)[:, None], other=0.0)
    most = tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=1), 1e-30)
    channel = key_channels(DIM, FORM, WIDTH)[None, :]
    TWICE: tl.constexpr = FORM != 40 or QUERIES < 8
    second = query * 0
    if TWICE:  # two columns of each query
        second = tl.join(query * 0, query * 0 + 1).reshape(2 * QUERIES)
        query = tl.join(query, query).reshape(2 * QUERIES)
        unit = tl.join(most, most).reshape(2 * QUERIES)
    else:
        unit = most
    there = (query < GROUP)[:, None] & (channel < DIM)
    x = tl.load(q + query[:, None] * head_stride + channel, mask=there, other=0.0).to(tl.float32)
    if FORM == 40:
        # e4m3 is 2 ** 8 times less as float16 in ``key_operand``.
        _, per_unit = power_of_two(unit)
        operand = tl.where((second == 0)[:, None], x * per_unit[:, None], 0.0).to(tl.float16)
        total = most
        most, _ = power_of_two(most)
        most *= 256.0
    else:
        whole = (x * (32512.0 / unit)[:, None] + 12582912.0) - 12582912.0
        upper = ((whole + 0.5) * 0.00390625 + 12582912.0) - 12582912.0  # lower: -128 to 127
        operand = tl.where((second == 0)[:, None], upper, whole - upper * 256.0).to(tl.int8)
        total, _ = tl.split(tl.sum(whole, axis=1).reshape(QUERIES, 2))
        most *= 1.0 / 32512.0
    return tl.trans(operand), total, most


@Helper
def key_words(held, strip, TILE: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    """Words of a strip of a tile's rows: [TILE, J], as many as tensor cores take at least."""
    WORDS: tl.constexpr = WIDTH // 4
    row = tl.arange(0, TILE)
    entry = row % (TILE // 4) * 4 + row // (TILE // 4)
    tile = entry // 16 * (STRIDE // 4) + entry % 16
    word = strip * (4 * WIDTH) + tl.arange(0, WORDS) * 16
    return tl.load(held.to(tl.pointer_type(tl.int32)) + (tile[:, None] + word[None, :]))


@Helper
def products(
    k,
    operand,
    total_of,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ASM: tl.constexpr,
):
    """Of a tile's rows with queries, float32 [TILE, Q], but for the steps of entries."""
    QUERIES: tl.constexpr = total_of.shape[0]
    levels = key_operand(k, DIM, TILE, STRIDE, FORM, WIDTH, ASM)
    if FORM == 40:
        s = tl.dot(levels, operand)
        if operand.shape[1] > QUERIES:
            s, _ = tl.split(s.reshape(TILE, QUERIES, 2))
    else:
        upper, lower = tl.split(tl.dot(levels, operand).reshape(TILE, QUERIES, 2))
        s = (upper * 256 + lower).to(tl.float32)
        if FORM > 64:
            s -= total_of[None, :] * ((1 << (FORM - 65)) - 0.5)
    return s


@Helper
def key_operand(
    held,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
    ASM: tl.constexpr,
):
    """Levels [TILE, N] of a tile's rows, in the order of ``key_channels``."""
    row = tl.arange(0, TILE)
    entry = row % (TILE // 4) * 4 + row // (TILE // 4)
    if FORM == 8:
        byte = tl.arange(0, max(DIM, 32)) % DIM
        at = (entry * DIM)[:, None] + byte[None, :]
        found = tl.load(held.to(tl.pointer_type(tl.int8)) + at)
    elif FORM == 40:
        at = (entry * (DIM // 4))[:, None] + tl.arange(0, DIM // 4)[None, :]
        word = tl.load(held.to(tl.pointer_type(tl.int32)) + at)
        found = beside_each_other(paired(e4m3_even(word)), paired(e4m3_odd(word)))
    elif FORM == 67:
        a = key_words(held, 0, TILE, STRIDE, WIDTH)
        b = key_words(held, 1, TILE, STRIDE, WIDTH)
        c = key_words(held, 2, TILE, STRIDE, WIDTH)
        found = two_fields(masked(a, 0x07070707, ASM), masked(a >> 3, 0x07070707, ASM))
        more = two_fields(masked(b, 0x07070707, ASM), masked(b >> 3, 0x07070707, ASM))
        found = beside_each_other(found, more)
        more = two_fields(masked(c, 0x07070707, ASM), masked(c >> 3, 0x07070707, ASM))
        even = masked(a >> 6, 0x03030303, ASM) | masked(c >> 5, 0x04040404, ASM)
        odd = masked(b >> 6, 0x03030303, ASM) | masked(c >> 4, 0x04040404, ASM)
        found = beside_each_other(found, beside_each_other(more, two_fields(even, odd)))
    else:
        BITS: tl.constexpr = FORM - 64
        MASK: tl.constexpr = ((1 << BITS) - 1) * 0x01010101
        word = key_words(held, 0, TILE, STRIDE, WIDTH)
        if WIDTH < 4 * BITS:  # as many as tensor cores take at least
            word = beside_each_other(word, word)
        found = fields(word, 0, 8 // BITS, BITS, MASK, ASM)
    return found


@Helper
def two_fields(even, odd):
    """Bytes [N, 8 J] of words of two fields [N, J], word by word: no lane has to ask another."""
    SHAPE: tl.constexpr = (even.shape[0], even.shape[1], 4)
    both = tl.join(bytes_of(even).reshape(SHAPE), bytes_of(odd).reshape(SHAPE))
    return both.permute(0, 1, 3, 2).reshape(even.shape[0], 8 * even.shape[1])


@Helper
def fields(
    word,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    MASK: tl.constexpr,
    ASM: tl.constexpr,
):
    """Bytes of fields of words, two by two."""
    if COUNT == 2:
        word = word >> FIRST * BITS
        found = two_fields(masked(word, MASK, ASM), masked(word >> BITS, MASK, ASM))
    else:
        left = fields(word, FIRST, COUNT // 2, BITS, MASK, ASM)
        right = fields(word, FIRST + COUNT // 2, COUNT // 2, BITS, MASK, ASM)
        found = beside_each_other(left, right)
    return found
