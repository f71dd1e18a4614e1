"""float32 numbers and their places as one int64, so that kernels choose the best without a sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper

if TYPE_CHECKING:
    import triton.language as tl


@Helper
def order_of(x, place):
    """An int64 that rises with float32 x and, among equals, falls with its place below 2^31.

    NaN is above all numbers, as in torch's sort. The int64 is always above -(2^62) and, since a
    GPU's own NaN has all bits set, by much below 2^62: differences do not overflow.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 equals 0
    bits = tl.where(x == x, bits, 0x7FC00000)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 31) + (0x7FFFFFFF - place)


@Helper
def nth_highest(orders, number, WAYS: tl.constexpr):
    """A limit that only the ``number`` highest of distinct orders reach; all, if they are fewer.

    ``WAYS`` limits at a time are tried, until one order is left between enough and too few.
    """
    low, high = tl.min(orders), tl.max(orders) + 1
    count_high, inside = 0, 2
    while (inside > 1) & (high - low > 1):
        limits = low + tl.maximum((high - low) // WAYS, 1) * tl.arange(0, WAYS)
        count = tl.sum((orders[None, :] >= limits[:, None]).to(tl.int32), axis=1)
        enough = count >= number
        low = tl.max(tl.where(enough, limits, low))
        high = tl.min(tl.where(enough, high, limits))
        count_high = tl.max(tl.where(enough, count_high, count))
        inside = tl.min(tl.where(enough, count, 2**30)) - count_high
    return low
