"""What top-k, top-p and min-p keep of a row's logits: all tokens from a cut-off on, without a sort.

A row is cut into parts, so that a few rows keep a GPU busy, too. The first launch finds the largest
logit of each of a tile's lanes: thousands of different tokens. What these alone let a filter keep
bounds its cut-off from below, and few other tokens are above that bound. The second launch picks
them, the third searches among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Helper, Kernel, num_processors
from kvserve.kernels.ordering import order_of

if TYPE_CHECKING:
    import triton.language as tl

# Tokens that a program takes at once, those of a search, and the parts it cuts its span into: its
# numbers are in registers.
_TILE, _FEW, _WAYS = 2048, 1024, 8
# Tiles under way: little else runs while a program waits for one.
_AHEAD = 3
# Tiles whose weights are added up by themselves, and then with those of other spans: so a sum does
# not depend on how many parts its row has, which other rows have a say in.
_SPAN = 8


def cut_offs(logits: Tensor, settings: Tensor) -> Tensor:
    """int64 [S]: a row's filters keep the tokens whose ``order_of`` is not below its cut-off.

    logits: float32 [S, V]; settings as in ``sample_tokens``.
    """
    rows, vocab = logits.shape
    span = _SPAN * _TILE
    spans = -(-vocab // span)
    parts = min(spans, max(1, num_processors(logits.device) // max(1, rows)))
    share = -(-spans // parts) * span
    parts = -(-vocab // share)
    cuts = torch.empty(rows, dtype=torch.int64, device=logits.device)
    lanes = torch.empty(rows, parts, _TILE, device=logits.device)
    totals = torch.empty(rows, spans, 2, device=logits.device)
    counts = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    # The tokens of each part that may be kept: nearly all of them, if logits are flat.
    strong = torch.empty(rows, spans * span, dtype=torch.int64, device=logits.device)
    row = logits, settings, vocab, logits.stride(0), share, spans
    found, grid = (cuts, counts, strong), (rows, parts)
    tile = {"SPAN": span, "TILE": _TILE, "AHEAD": _AHEAD}
    few = {"FEW": _FEW, "WAYS": _WAYS}
    _survey.launch(grid, lanes, totals, *row, **tile, num_warps=8)
    _pick.launch(grid, *found, lanes, totals, *row, **tile, **few, num_warps=8)
    _narrow.launch(
        (rows,), *found, totals, settings, parts, share, spans, SPAN=span, **few, num_warps=8
    )
    return cuts


@Helper
def _filters(settings, row):
    """A row's temperature, top_p, top_k and min_p, and whether it filters at all."""
    temperature, top_p = tl.load(settings + row * 4), tl.load(settings + row * 4 + 1)
    top_k, min_p = tl.load(settings + row * 4 + 2), tl.load(settings + row * 4 + 3)
    filters = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return temperature, top_p, top_k, min_p, filters


@Helper
def _weight(order, best):
    """exp(x - best) of ``order_of``'s x."""
    bits = (order >> 31).to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.exp(bits.to(tl.float32, bitcast=True) - best)


@Helper
def _whole(totals, spans):
    """The largest logit of a row, and the sum of all tokens' weights beside it."""
    best = tl.load(totals)
    for span in range(1, spans):
        best = tl.maximum(best, tl.load(totals + 2 * span))
    total = 0.0
    for span in range(spans):
        total += tl.load(totals + 2 * span + 1) * tl.exp(tl.load(totals + 2 * span) - best)
    return best, total


@Helper
def _weakest_kept(
    strong,
    count,
    floor,
    best,
    target,
    BY_MASS: tl.constexpr,
    WAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The highest cut-off above which ``target`` tokens, or weights that add to it, are kept.

    It is not below ``floor``. ``WAYS`` limits at a time are tried over the ``count`` orders at
    ``strong``, until a single order is left between enough and too few.
    """
    low, high = floor, order_of(best, 0) + 1
    number_high, inside = 0, count
    while (inside > 1) & (high - low > 1):
        limits = low + tl.maximum((high - low) // WAYS, 1) * tl.arange(0, WAYS)
        number = tl.zeros([WAYS], tl.int32)
        mass = tl.zeros([WAYS], tl.float32)
        for start in range(0, count, TILE):
            place = start + tl.arange(0, TILE)
            order = tl.load(strong + place, mask=place < count, other=-(2**62))
            above = order[None, :] >= limits[:, None]
            number += tl.sum(above.to(tl.int32), axis=1)
            if BY_MASS:
                mass += tl.sum(tl.where(above, _weight(order, best)[None, :], 0.0), axis=1)
        enough = mass >= target if BY_MASS else number >= target
        low = tl.max(tl.where(enough, limits, floor))
        high = tl.min(tl.where(enough, high, limits))
        number_high = tl.max(tl.where(enough, number_high, number))
        inside = tl.min(tl.where(enough, number, count)) - number_high
    return low


@Kernel
def _survey(
    lanes,
    totals,
    logits,
    settings,
    vocab,
    stride,
    share,
    spans,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _, _, _, filters = _filters(settings, row)
    logits += row * stride
    totals += row * spans * 2
    lane = tl.arange(0, TILE)
    size = tl.where(filters, vocab, 0)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, vocab), SPAN):
        high = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for start in tl.range(first, tl.minimum(first + SPAN, size), TILE, num_stages=AHEAD):
            x = tl.load(logits + start + lane, mask=start + lane < size, other=float("-inf"))
            x = tl.div_rn(x, temperature)
            new_high = tl.maximum(high, x)
            shift = tl.where(new_high == float("-inf"), 0.0, new_high)
            total = total * tl.exp(high - shift) + tl.exp(x - shift)
            high = new_high
        best = tl.maximum(tl.max(high), -3e38)  # finite, if all are banned
        span = first // SPAN
        tl.store(totals + span * 2, best)
        tl.store(totals + span * 2 + 1, tl.sum(total * tl.exp(high - best)))
        highest = tl.maximum(highest, high)
    place = row * tl.num_programs(1) + part
    tl.store(lanes + place * TILE + lane, highest)


@Kernel
def _pick(
    cuts,
    counts,
    strong,
    lanes,
    totals,
    logits,
    settings,
    vocab,
    stride,
    share,
    spans,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    FEW: tl.constexpr,
    WAYS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    temperature, top_p, top_k, min_p, filters = _filters(settings, row)
    place, lane = row * parts + part, tl.arange(0, TILE)
    lanes += row * parts * TILE + lane
    high = tl.load(lanes)
    for other in range(1, parts):
        high = tl.maximum(high, tl.load(lanes + other * TILE))
    best, total = _whole(totals + row * spans * 2, spans)

    # What min-p drops of the lanes' largest is below all that the row may draw.
    strong += row * spans * SPAN + part * share
    order = order_of(high, 0x7FFFFFFF)
    tl.store(strong + lane, order)
    tl.debug_barrier()  # what some threads stored, others load
    none = order_of(tl.full([], float("-inf"), tl.float32), 0x7FFFFFFF)
    weak = tl.exp(high - best) < tl.where(top_k == 0, min_p, 0.0)
    floor = tl.max(tl.where(weak, order, none))
    # Where enough of the lanes' largest are above a limit, or enough weight, so are enough tokens.
    by_number = tl.where(filters & (top_k > 0) & (top_k <= TILE), TILE, 0)
    floor = _weakest_kept(strong, by_number, floor, best, top_k, False, WAYS, FEW)
    by_mass = tl.where(filters & (top_k == 0) & (top_p < 1), TILE, 0)
    floor = _weakest_kept(strong, by_mass, floor, best, top_p * total, True, WAYS, FEW)
    tl.debug_barrier()

    logits += row * stride
    first, count = part * share, 0
    end = tl.where(filters, tl.minimum(first + share, vocab), first)
    for start in tl.range(first, end, TILE, num_stages=AHEAD):
        token = start + lane
        x = tl.load(logits + token, mask=token < end, other=float("-inf"))
        order = order_of(tl.div_rn(x, temperature), token)
        chosen = (token < end) & (order >= floor)
        at = count + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        tl.store(strong + at, order, mask=chosen)
        count += tl.sum(chosen.to(tl.int32))
    tl.store(counts + place, count)
    if part == 0:
        tl.store(cuts + row, floor)


@Kernel
def _narrow(
    cuts,
    counts,
    strong,
    totals,
    settings,
    num_parts,
    share,
    spans,
    SPAN: tl.constexpr,
    FEW: tl.constexpr,
    WAYS: tl.constexpr,
):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, FEW)
    _, top_p, top_k, min_p, filters = _filters(settings, row)
    best, total = _whole(totals + row * spans * 2, spans)
    counts += row * num_parts
    strong += row * spans * SPAN
    count = tl.load(counts)
    for part in range(1, num_parts):  # side by side
        own = tl.load(counts + part)
        for start in range(0, own, FEW):
            place = start + lane
            order = tl.load(strong + part * share + place, mask=place < own)
            tl.debug_barrier()  # all have loaded what some overwrite
            tl.store(strong + count + place, order, mask=place < own)
        count += own
    tl.debug_barrier()

    floor = tl.load(cuts + row)
    asked = (top_k > 0) & (top_k < count)
    cut = _weakest_kept(strong, tl.where(asked, count, 0), floor, best, top_k, False, WAYS, FEW)
    kept = 0.0
    least = order_of(best, 0)
    for start in range(0, count, FEW):
        order = tl.load(strong + start + lane, mask=start + lane < count, other=-(2**62))
        left = order >= cut
        weight = tl.where(left, _weight(order, best), 0.0)
        kept += tl.sum(weight)
        least = tl.min(tl.where(left & (weight >= min_p), tl.minimum(order, least), least))
    cut = tl.where(filters, least, floor)
    target = top_p * tl.where(top_k > 0, kept, total)
    count = tl.where(top_p < 1, count, 0)
    tl.store(cuts + row, _weakest_kept(strong, count, cut, best, target, True, WAYS, FEW))
