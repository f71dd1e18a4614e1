"""Keys and values held as levels, as tensor cores take them: operands of ``decode_levels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper
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


@Helper
def masked(words, MASK: tl.constexpr, ASM: tl.constexpr):
    """``words & MASK`` of what becomes bytes: LLVM would mask each byte of its own if it saw it."""
    if ASM:
        words = tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [words, MASK], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        words = words & MASK
    return words


@Helper
def bytes_of(words):
    """int32 [N, J] -> int8 [N, 4 J]."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    return tl.join(even, odd).reshape(words.shape[0], 4 * words.shape[1])


@Helper
def value_operand(
    held,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STRIDE: tl.constexpr,
    FORM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Levels [N, TILE] of a tile's entries, numbers of float16, in the order of ``value_channels``.

    Entries are in the order (odd ones, fours, the upper two).
    """
    words = held.to(tl.pointer_type(tl.int32))
    if FORM > 64:
        quad = tl.arange(0, TILE // 4)[None, :]
        at = words + (quad // 4 * (STRIDE // 4) + quad % 4 * WIDTH + tl.arange(0, WIDTH)[:, None])
        found = tl.load(at)
        if FORM == 67:
            second, third = tl.load(at + 4 * WIDTH), tl.load(at + 8 * WIDTH)
            even = of_three(found, second, third)
            odd = of_three(found >> 8, second >> 8, third >> 8)
        else:
            BITS: tl.constexpr = FORM - 64
            even = halves_of_fields(found, 0, 8 // BITS, BITS)
            odd = halves_of_fields(found >> 8, 0, 8 // BITS, BITS)
        found = beside_each_other(even, odd)
    else:
        WORDS: tl.constexpr = DIM * (FORM % 16) // 32
        pair = tl.arange(0, TILE // 2)
        entry = pair % (TILE // 4) * 4 + pair // (TILE // 4)
        at = words + ((entry * WORDS)[None, :] + tl.arange(0, WORDS)[:, None])
        u, w = tl.load(at), tl.load(at + 2 * WORDS)
        x, y = u & 0xFFFF | w << 16, u >> 16 & 0xFFFF | w & -65536
        found = on_each_other(of_two_bytes(x, FORM), of_two_bytes(y, FORM))
    return found


@Helper
def value_channels(DIM: tl.constexpr, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Which channel each row of ``value_operand`` is (DIM or more: none), what its numbers have to
    be multiplied by, and what was added to them then."""
    if FORM > 64:
        FIELDS: tl.constexpr = 8 if FORM == 67 else 8 // (FORM - 64)
        channel = tl.arange(0, FIELDS * WIDTH)
        field = channel // WIDTH
        shift = tl.where(field < 6, field % 2 * 3, 6) if FORM == 67 else field * (FORM - 64)
        # Bits of float16, 2 ** 24 times less, shifted.
        times = 16777216.0 / (1 << shift).to(tl.float32)
        offset = (1 << (FORM - 65)) - 0.5
    else:
        row = tl.arange(0, DIM)
        times, offset = tl.full([DIM], 1.0, tl.float32), 1152.0
        WORDS: tl.constexpr = DIM * (FORM % 16) // 32
        if FORM == 20:
            upper = row // WORDS % 2
            channel = upper * (DIM // 2) + row % WORDS * 4 + row // (2 * WORDS)
            times = tl.where(upper == 1, 1048576.0, 16777216.0)
        else:
            channel = row % WORDS * 4 + row // WORDS
            if FORM == 40:
                times, offset = times * 256.0, 0.0
    return channel, times, offset


@Helper
def of_two_bytes(x, FORM: tl.constexpr):
    """Two bytes each of two entries -> numbers of float16, byte on byte."""
    if FORM == 20:
        even = on_each_other(paired(x & 0x000F000F), paired(x & 0x00F000F0))
        odd = on_each_other(paired(x >> 8 & 0x000F000F), paired(x >> 8 & 0x00F000F0))
    elif FORM == 40:
        even, odd = paired(e4m3_even(x)), paired(e4m3_odd(x))
    else:  # 1152 more
        even = paired(x & 0x00FF00FF ^ 0x64806480)
        odd = paired(x >> 8 & 0x00FF00FF ^ 0x64806480)
    return on_each_other(even, odd)


@Helper
def halves_of_fields(word, FIRST: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Fields of bytes 0 and 2 of words, field on field, each where it stands."""
    if COUNT == 1:
        MASK: tl.constexpr = ((1 << BITS) - 1 << FIRST * BITS) * 0x00010001
        found = paired(word & MASK)
    else:
        below = halves_of_fields(word, FIRST, COUNT // 2, BITS)
        found = on_each_other(below, halves_of_fields(word, FIRST + COUNT // 2, COUNT // 2, BITS))
    return found


@Helper
def of_three(a, b, c):
    """The eight fields of 3 bits of bytes 0 and 2 of the words of three strips, field on field."""
    low = on_each_other(paired(a & 0x00070007), paired(a & 0x00380038))
    low = on_each_other(low, on_each_other(paired(b & 0x00070007), paired(b & 0x00380038)))
    more = on_each_other(paired(c & 0x00070007), paired(c & 0x00380038))
    a = a & 0x00C000C0 | c << 1 & 0x01000100
    b = b & 0x00C000C0 | c << 2 & 0x01000100
    return on_each_other(low, on_each_other(more, on_each_other(paired(a), paired(b))))


@Helper
def paired(words):
    """int32 [N, J], two halves each -> float16 [N, 2 J]."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(tl.float16, bitcast=True)
    return both.reshape(words.shape[0], 2 * words.shape[1])


@Helper
def beside_each_other(a, b):
    """[N, J] twice -> [N, 2 J]."""
    return tl.join(a, b).permute(0, 2, 1).reshape(a.shape[0], 2 * a.shape[1])


@Helper
def on_each_other(a, b):
    """[N, J] twice -> [2 N, J]."""
    return tl.join(a, b).permute(2, 0, 1).reshape(2 * a.shape[0], a.shape[1])


@Helper
def e4m3_even(words):
    """Bytes 0 and 2, numbers of e4m3, as two numbers of float16 that are 2 ** 8 times less."""
    return (words & 0x00800080) << 8 | (words & 0x007F007F) << 7


@Helper
def e4m3_odd(words):
    """Bytes 1 and 3."""
    return words & -2147450880 | words >> 1 & 0x3F803F80
