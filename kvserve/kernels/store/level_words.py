"""Words of levels in registers, as ``decode_levels`` takes them apart, and steps of entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper

if TYPE_CHECKING:
    import triton.language as tl


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
def of_rows(first, second, third, fourth):
    """Of the four entries of each quarter, [N] -> in the order of rows [4 N]."""
    each = tl.join(tl.join(first, second), tl.join(third, fourth))
    return each.permute(2, 1, 0).reshape(4 * first.shape[0])


@Helper
def first_of(skipped, STRIDE: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr):
    """Where a block's vectors (of ``DIM`` channels) begin behind the first ``skipped`` ones."""
    WIDTH: tl.constexpr = DIM * (FORM % 16) // 8
    return skipped // 16 * STRIDE if FORM > 64 else skipped * WIDTH


@Helper
def steps_of(held, log, TILE: tl.constexpr, STRIDE: tl.constexpr, FORM: tl.constexpr):
    """Steps or lows of a tile's rows: bfloat16, or codes of few bits."""
    quad = tl.arange(0, TILE // 4)
    if FORM > 64:
        words = held.to(tl.pointer_type(tl.int32)) + (quad // 4 * (STRIDE // 4) + quad % 4)
        words = tl.load(words)
        code = of_rows(words & 255, words >> 8 & 255, words >> 16 & 255, words >> 24 & 255)
        steps = tl.exp2(code.to(tl.float32) * 0.0625 + log)
    else:
        pairs = tl.load(held.to(tl.pointer_type(tl.int64)) + quad)
        a, b = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
        bits = of_rows(a << 16, a & -65536, b << 16, b & -65536)
        steps = bits.to(tl.float32, bitcast=True)
    return steps


@Helper
def e4m3_even(words):
    """Bytes 0 and 2, numbers of e4m3, as two numbers of float16 that are 2 ** 8 times less."""
    return (words & 0x00800080) << 8 | (words & 0x007F007F) << 7


@Helper
def e4m3_odd(words):
    """Bytes 1 and 3."""
    return words & -2147450880 | words >> 1 & 0x3F803F80
