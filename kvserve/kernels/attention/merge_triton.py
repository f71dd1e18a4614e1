"""The mean over a context's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def merge(
    out,
    parts,
    sums,
    part_recent,
    shares,
    places,
    splits,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    SHARES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, SPAN), tl.arange(0, DIM)
    at = part.to(tl.int64) * places + place
    log_sum = tl.load(sums + at, mask=part < splits, other=float("-inf"))
    high = tl.max(log_sum, axis=0)
    base = tl.where(high == float("-inf"), 0.0, high)
    weight = tl.exp2(log_sum - base)
    part_at = parts + at[:, None] * DIM + dims[None, :]
    means = tl.load(part_at, mask=(log_sum > float("-inf"))[:, None], other=0.0)
    total = tl.sum(weight, axis=0)
    if SHARES:
        recent = tl.load(part_recent + at, mask=part < splits, other=float("-inf"))
        share = tl.log2(tl.sum(tl.exp2(recent - base), axis=0)) - tl.log2(total)
        tl.store(shares + place, tl.where(total > 0, share * 0.6931471805599453, 0.0))  # ln(2)
    mean = tl.sum(means * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, mean.to(out.dtype.element_ty))
