"""Budgets by layer and head: the papers' numbers, naive references, and what must hold."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from kvserve.engine.policies.dynamickv import DynamicKV, best_per_layer
from kvserve.engine.policies.parts.budgets import (
    group_budgets,
    pyramid_budgets,
    round_to_sum,
    share_out,
)
from kvserve.engine.policies.pyramidkv import PyramidKV
from tests.engine.policies.one_row import tied

# ---- PyramidKV ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "window", "layers", "length", "budgets"),
    [
        (128, 8, 32, 4000, list(range(234, 16, -7))),
        (2048, 8, 32, 31500, list(range(3978, 102, -125))),
        (20, 4, 4, 100, [32, 22, 12, 2]),
        (20, 4, 4, 33, [29, 21, 13, 5]),
        (20, 4, 4, 32, [28, 20, 12, 4]),
        (20, 4, 4, 31, [16] * 4),
        (20, 4, 4, 24, [16] * 4),
        (20, 4, 1, 100, [16]),
    ],
)
def test_pyramids_as_released(
    budget: int, window: int, layers: int, length: int, budgets: list[int]
) -> None:
    policy = PyramidKV(budget=budget, window=window)
    assert policy.layer_budgets(layers, length, budget, "prefill") == budgets


def test_pyramids_on_many_shapes() -> None:
    shapes = itertools.product([1, 7, 40], [0, 1, 9, 300], [1, 2, 5, 8], [1, 3, 20])
    for base, spare, layers, beta in shapes:
        most = base + spare
        released = pyramid_budgets(base, most, layers, beta, exact=False)
        exact = pyramid_budgets(base, most, layers, beta, exact=True)
        assert sum(exact) == layers * base
        assert 0 <= sum(released) - layers * base <= layers * (layers - 1) / 2
        for budgets in (released, exact):
            assert budgets == sorted(budgets, reverse=True)
            assert budgets[-1] >= 0 and budgets[0] <= most
            assert budgets[-1] >= base // beta or budgets[0] == most


def test_largest_remainders() -> None:
    thirds = [Fraction(7, 3), Fraction(5, 3), Fraction(0), Fraction(2)]
    assert round_to_sum(thirds) == [2, 2, 0, 2]
    assert round_to_sum([Fraction(1, 2)] * 4) == [1, 1, 0, 0]


def test_in_decode_layers_grow_into_the_pyramid() -> None:
    """Budget 40, an event whenever 48 are held on average: the mean stays, the spread grows."""
    policy = PyramidKV(budget=40, window=4, trigger="threshold", threshold=48)
    lengths = [48] * 4
    spread = []
    for _ in range(8):
        past = policy.layer_budgets(4, max(lengths), 40, "threshold")
        kept = [min(n - 4, b) + 4 for n, b in zip(lengths, past, strict=True)]
        assert 4 * 40 - 3 <= sum(kept) <= 4 * 40
        spread.append(kept[0] - kept[-1])
        lengths = [n + 8 for n in kept]
    assert spread[0] == 16 and spread == sorted(spread)
    assert past == pyramid_budgets(36, 10**6, 4, 20, exact=True)


# ---- WindowKV -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "size", "mean", "shape", "released", "equations"),
    [
        (8, 2, 12, 4, [18, 14, 10, 6], [21, 15, 9, 3]),
        (8, 8, 12, 4, [12], [12]),
        (32, 8, 512, 14, [732, 586, 440, 292], [988, 671, 354, 36]),
        (32, 8, 1024, 14, [1463, 1171, 879, 585], [1975, 1341, 707, 73]),
        (32, 8, 2048, 14, [2926, 2341, 1756, 1170], [3950, 2682, 1414, 146]),
        (28, 7, 2048, 14, [3072, 2390, 1708, 1024], [3950, 2682, 1414, 146]),
        (32, 16, 2048, 14, [1756, 2340], [3950, 146]),
        (28, 14, 2048, 14, [2048, 2048], [3950, 146]),
    ],
)
def test_pyramids_by_group(
    layers: int, size: int, mean: int, shape: int, released: list[int], equations: list[int]
) -> None:
    given = mean, layers // size, size, Fraction(shape)
    assert group_budgets(*given, "released") == released
    assert group_budgets(*given, "equations") == equations


def test_group_budgets_overshoot_by_little() -> None:
    for groups, size, mean in itertools.product([2, 3, 4, 7], [1, 2, 5, 8], [1, 50, 333]):
        budgets = group_budgets(mean, groups, size, Fraction(14), "released")
        assert budgets == sorted(budgets, reverse=True)
        total = size * sum(budgets)
        exact = mean * groups * size
        assert exact <= total <= exact + size * (groups - 1) * (groups - 2) / 2


# ---- Ada-KV -------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ["0", "0.2", "0.25", "1/2", "1"])
@pytest.mark.parametrize("base", [1, 4, 5, 33])
def test_sharing_out(alpha: str, base: int) -> None:
    """The authors' rounding in exact numbers, whose ``round`` takes halves to the even."""
    share = Fraction(alpha)
    won = torch.randint(0, 2 * base + 1, (50, 3), generator=torch.Generator().manual_seed(base))
    won[:, 2] = 3 * base - won[:, :2].sum(1)
    won = won[won[:, 2] >= 0]
    mean = torch.tensor([[base]])
    expected = [[round(c * (1 - share) + int(base * share)) for c in row] for row in won.tolist()]
    assert share_out(won, mean, share, exact=False).tolist() == expected
    exact = share_out(won, mean, share, exact=True)
    assert (exact.sum(-1) == 3 * base).all()
    for row, shares in zip(won.tolist(), exact.tolist(), strict=True):
        assert shares == round_to_sum([c * (1 - share) + base * share for c in row])


# ---- DynamicKV ----------------------------------------------------------------------------------


def test_counts_of_the_best() -> None:
    """Ties at the cut go to lower layers, whatever their heads."""
    for seed in range(30):
        scores = tied(2, 3, 2, 11, seed=seed)
        count = 1 + seed * 2
        for event, got in zip(scores, best_per_layer(scores, count).tolist(), strict=True):
            flat = event.flatten().tolist()
            order = sorted(range(66), key=lambda j: (-flat[j], j))[:count]
            assert got == [sum(j // 22 == layer for j in order) for layer in range(3)]


COUNTS = [9000, 3300, 3000, 2700, 3300, 2700, 3420, 3300]


@pytest.mark.parametrize(
    ("rounding", "counts", "shares"),
    [
        ("exact", [6144, 3840, 3072, 2304], [1536, 960, 768, 576]),
        ("exact", COUNTS, [1125, 412, 375, 337, 412, 337, 427, 415]),
        ("released", COUNTS, [1127, 411, 375, 337, 411, 337, 427, 415]),
        ("exact", [3840] * 32, [120] * 32),
        ("released", [3840] * 32, [120] * 32),
    ],
)
def test_shares_of_the_worked_example(rounding: str, counts: list[int], shares: list[int]) -> None:
    """32 layers and heads, 120 entries a layer, and never more than 1200."""
    policy = DynamicKV(budget=128, rounding=rounding)
    assert policy.shares(torch.tensor([counts]), 120, 1200, 32).tolist() == [shares]


def test_released_rounding_with_tiny_budgets() -> None:
    counts = torch.tensor([[3, 1]])
    exact, released = (DynamicKV(budget=3, window=1, rounding=r) for r in ("exact", "released"))
    assert exact.shares(counts, 2, 6, 2).tolist() == [[3, 1]]
    assert released.shares(counts, 2, 6, 2).tolist() == [[2, 2]]
    none = torch.tensor([[1, 1, 1]])
    assert released.shares(none, 1, 6, 4).tolist() == [[0, 0, 4]]
