"""How many entries each layer or head keeps: integers that add up as their papers say."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor


def pyramid_budgets(base: int, most: int, num_layers: int, beta: int, exact: bool) -> list[int]:
    """Entries before the window that each layer keeps: falling linearly with depth.

    ``base`` is their mean, ``most`` how many there are; the last layer keeps ``base // beta`` or
    more.
    As released every step is rounded down, so that their sum exceeds ``num_layers * base`` by less
    than ``num_layers * (num_layers - 1) / 2``; ``exact`` hands out largest remainders instead.
    PyramidKV, arXiv 2406.02069, section 4.2, and the authors' code.
    """
    if num_layers == 1:
        return [base]
    low = base // beta
    high = 2 * base - low
    if high >= most:
        high, low = most, 2 * base - most
    if exact:
        step = Fraction(high - low, num_layers - 1)
        return round_to_sum([high - layer * step for layer in range(num_layers)])
    return [high - layer * ((high - low) // (num_layers - 1)) for layer in range(num_layers)]


def round_to_sum(shares: Sequence[Fraction | int]) -> list[int]:
    """Round down, then give what is missing of the (whole) sum to the largest remainders.

    Among equal remainders the first comes first.
    """
    rounded = [int(share // 1) for share in shares]
    order = sorted(range(len(shares)), key=lambda at: rounded[at] - shares[at])
    for at in order[: int(sum(shares)) - sum(rounded)]:
        rounded[at] += 1
    return rounded


def group_budgets(
    mean: int, num_groups: int, group_size: int, shape: Fraction, rule: str
) -> list[int]:
    """Entries before the window that the layers of each group keep: WindowKV's pyramid.

    The last group keeps ``mean * group_size / shape`` (rule ``released``) or ``mean / shape``
    (``equations``), the first as much above the mean; steps between are rounded down. arXiv
    2503.17922, section 3, and the authors' code.
    """
    if num_groups == 1:
        return [mean]
    last = int(mean * (group_size if rule == "released" else 1) // shape)
    first = 2 * mean - last
    step = (first - last) // (num_groups - 1)
    return [*(first - group * step for group in range(num_groups - 1)), last]


def linear_budgets(
    length: int, window: int, ratio: Fraction, least: Fraction, num_layers: int
) -> list[int]:
    """Entries before the window that each layer keeps, falling linearly from the first to the last.

    Windows included, a layer keeps ``ratio`` of ``length`` entries on average, rounded down. The
    last one keeps the share ``least`` of its context; if the first one would then have to keep more
    than its whole context, it keeps all of it instead. If ``ratio`` is too small for that, all
    layers keep equally many. SpindleKV, section 3 (with the sign of its second branch put right).
    """
    context = length - window
    if context <= 0:
        return [0] * num_layers
    mean = max((ratio * length - window) / context, Fraction(0))
    first, last = 2 * mean - least, least
    if mean <= least or num_layers == 1:
        first = last = mean
    elif 2 * mean > 1 + least:
        first, last = Fraction(1), 2 * mean - 1
    shares = [
        first + (last - first) * Fraction(i, max(num_layers - 1, 1)) for i in range(num_layers)
    ]
    return [int(share * context // 1) for share in shares]


def share_out(counts: Tensor, base: Tensor, alpha: Fraction, exact: bool) -> Tensor:
    """Mix counts with a uniform share: ``round(counts * (1 - alpha) + floor(base * alpha))``.

    counts: int64 [..., H]; base: int64, broadcast to it. Halves go to the even neighbour. ``exact``
    rounds ``counts * (1 - alpha) + base * alpha`` so that the sum stays that of the counts. Ada-KV,
    arXiv 2407.11550, Algorithm 2, and the authors' code.
    """
    top, bottom = alpha.numerator, alpha.denominator
    scaled = counts * (bottom - top)
    if exact:
        scaled = scaled + base * top
        rounded, rest = scaled // bottom, scaled % bottom
        short = rest.sum(dim=-1, keepdim=True) // bottom
        rank = rest.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return rounded + (rank < short)
    rounded = scaled // bottom + base * top // bottom
    rest = 2 * (scaled % bottom)
    return rounded + ((rest > bottom) | ((rest == bottom) & (rounded % 2 == 1)))


def layers(budgets: Sequence[int], like: Tensor) -> Tensor:
    """One number per layer as int64 [L, 1], to be compared with [E, L, Hkv]."""
    # Pinned, or the host would wait for the device.
    host = torch.tensor(budgets, pin_memory=like.is_cuda)
    return host.to(like.device, non_blocking=True)[:, None]
