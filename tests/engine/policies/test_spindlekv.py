"""SpindleKV's eviction: its schedule and its scores."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from kvserve.engine.policies.parts.budgets import linear_budgets
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.spindlekv import SpindleKV
from tests.engine.policies.one_row import choose_unevenly

BETA = Fraction(1, 20)


@pytest.mark.parametrize(
    ("ratio", "budgets"),
    [
        ("0.4", [63, 48, 34, 19, 5]),
        ("0.8", [100, 89, 78, 67, 56]),
        ("0.12", [3] * 5),
        ("0.09", [0] * 5),
        ("1", [100] * 5),
    ],
)
def test_schedules_worked_out_by_hand(ratio: str, budgets: list[int]) -> None:
    assert linear_budgets(110, 10, Fraction(ratio), BETA, 5) == budgets


def test_a_large_schedule() -> None:
    budgets = linear_budgets(4096, 8, Fraction(3, 10), BETA, 32)
    assert [budgets[i] for i in (0, 1, 15, 16, 31)] == [2237, 2171, 1253, 1188, 204]


def test_schedules_fall_and_add_up() -> None:
    rng = random.Random(0)
    for _ in range(500):
        window, count = rng.randint(1, 40), rng.randint(1, 40)
        length = window + rng.randint(1, 5000)
        ratio, beta = Fraction(rng.randint(1, 100), 100), Fraction(rng.randint(0, 99), 100)
        budgets = linear_budgets(length, window, ratio, beta, count)
        context = length - window
        mean = max(ratio * length - window, Fraction(0))
        assert budgets == sorted(budgets, reverse=True)
        assert budgets[-1] >= 0 and budgets[0] <= context
        assert count * mean - count < sum(budgets) <= count * mean
        assert linear_budgets(window, window, ratio, beta, count) == [0] * count


def test_the_mean_of_query_heads_chooses_for_their_kv_head() -> None:
    heads = torch.tensor([[0.40, 0.30, 0.08, 0.05], [0.05, 0.30, 0.35, 0.10]])
    policy = SpindleKV(ratio="2/3", window=2)
    assert policy.layer_budgets(1, 6) == [2]
    assert choose_unevenly(policy, heads.mean(dim=0)[None, None], 6, 4) == [[[0, 1, 4, 5]]]


def test_votes_are_plain_or_by_age() -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(1, 2, 4, 3, 8, generator=generator)
    obs = Observation(queries, torch.randn(1, 2, 2, 9, 8, generator=generator), 0.5)
    plain = SpindleKV(window=3).score(obs)
    assert torch.equal(plain, obs.causal("mean"))
    by_age = SpindleKV(window=3, score_norm="age").score(obs)
    torch.testing.assert_close(by_age, plain / torch.arange(9, 3, -1))
    pooled = SpindleKV(window=3, pooling="max", kernel_size=3).score(obs)
    assert (pooled >= plain).all() and not torch.equal(pooled, plain)
