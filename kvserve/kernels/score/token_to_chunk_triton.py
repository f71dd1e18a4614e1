"""Scores in, kept places out: Kara's Token2Chunk in one launch for every lane of an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.ordering import nth_highest, order_of

if TYPE_CHECKING:
    import triton.language as tl

# A program holds all scores of its lane.
MOST_SCORES = 4096


def token_to_chunk_triton(scores: Tensor, keep: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """As ``token_to_chunk_torch`` of the engine's ``policies/selection.py``, with equal results.

    scores: float32 [..., n] of at most ``MOST_SCORES`` -> ascending int64 [..., keep].
    """
    length = scores.shape[-1]
    if scores.dtype is not torch.float32 or not 0 < keep <= length <= MOST_SCORES:
        raise ValueError(
            f"{keep} of scores {list(scores.shape)}, {scores.dtype}: needs float32, at most "
            f"{MOST_SCORES} scores and no more kept than there are"
        )
    scores = scores.contiguous()
    kept = torch.empty(*scores.shape[:-1], keep, dtype=torch.int64, device=scores.device)
    singles, chunks = keep - chunk_budget, chunk_budget // (max_chunk - 2)
    span = max(16, 1 << (length - 1).bit_length())
    _choose.launch(
        (scores.numel() // length,),
        *(kept, scores, length, keep, singles, chunks, max_chunk),
        CHUNKS=chunks > 0 and singles > 1,
        SPAN=span,
        WAYS=8,
        num_warps=max(1, span // 256),
    )
    return kept


@Helper
def _earlier(a, b):
    return tl.minimum(a, b)


@Helper
def _later(a, b):
    return tl.maximum(a, b)


@Kernel
def _choose(
    kept,
    scores,
    length,
    keep,
    singles,
    chunks,
    max_chunk,
    CHUNKS: tl.constexpr,
    SPAN: tl.constexpr,
    WAYS: tl.constexpr,
):
    lane, place = tl.program_id(0).to(tl.int64), tl.arange(0, SPAN)
    scores += lane * length
    none = tl.full([SPAN], -(2**62), tl.int64)
    score = tl.load(scores + place, mask=place < length, other=0.0)
    order = tl.where(place < length, order_of(score, place), none)
    if CHUNKS:
        selected = order >= nth_highest(order, singles, WAYS)
        # For each place that is not selected, the nearest selected ones on both sides.
        left = tl.associative_scan(tl.where(selected, place, -1), 0, _later)
        right = tl.associative_scan(tl.where(selected, place, SPAN), 0, _earlier, reverse=True)
        gap = (left >= 0) & (right < SPAN) & (right - left < max_chunk) & (selected == 0)
        ends = tl.load(scores + right, mask=gap, other=0.0)
        ends += tl.load(scores + left, mask=gap, other=0.0)
        worth = order_of(ends * (right - left - 1).to(tl.float32), left)
        first = tl.where(gap & (place == left + 1), worth, none)
        inside = gap & (worth >= nth_highest(first, chunks, WAYS))
        best = order_of(tl.full([SPAN], float("inf"), tl.float32), place)
        order = tl.where(selected | inside, best, order)
    chosen = order >= nth_highest(order, keep, WAYS)
    at = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(kept + lane * keep + at, place.to(tl.int64), mask=chosen)
