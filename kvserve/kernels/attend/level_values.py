"""Values held as levels, as tensor cores take them, for ``decode_levels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper
from kvserve.kernels.store.level_words import (
    beside_each_other,
    e4m3_even,
    e4m3_odd,
    on_each_other,
    paired,
)

if TYPE_CHECKING:
    import triton.language as tl


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
