"""SpindleKV's eviction: its schedule, its scores and its two ways with query heads."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from kvserve.engine.policies.parts.budgets import linear_budgets
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import best_by_query_head, union_and_newest
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.kernels.coded_entries import ALL_HEADS
from tests.engine.policies.uneven.choices import choose

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
    assert choose(policy, heads.mean(dim=0)[None, None], 6, 4) == [[[0, 1, 4, 5]]]


def test_query_heads_choose_for_themselves() -> None:
    heads = torch.tensor([[0.40, 0.30, 0.08, 0.05], [0.05, 0.30, 0.35, 0.10]])
    chosen = best_by_query_head(heads[None], torch.tensor([2]))
    assert chosen[0].long().tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert chosen[0].sum(dim=0).tolist() == [1, 2, 1, 0]
    indices, counts, who = union_and_newest(chosen, 6)
    assert counts.tolist() == [5] and indices[0, :5].tolist() == [0, 1, 2, 4, 5]
    assert who[0, :5].tolist() == [0b01, ALL_HEADS, 0b10, ALL_HEADS, ALL_HEADS]


def test_masks_are_each_heads_own_entries() -> None:
    """Attention over the union under a mask is attention over what a query head chose."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(2, 6, 20, generator=generator)
    query, key, value = (torch.randn(2, n, 20, 8, generator=generator) for n in (6, 2, 2))
    chosen = best_by_query_head(scores.unflatten(1, (2, 3)), torch.tensor([7, 7]))
    for event in range(2):
        for head in range(6):
            kv, own = divmod(head, 3)
            held = chosen[event, kv].any(dim=0).nonzero()[:, 0]
            logits = key[event, kv, held] @ query[event, head, -1]
            hidden = ~chosen[event, kv, own, held]
            masked = logits.masked_fill(hidden, -torch.inf).softmax(dim=0) @ value[event, kv, held]
            kept = scores[event, head].argsort(descending=True)[:7]
            alone = (key[event, kv, kept] @ query[event, head, -1]).softmax(dim=0)
            torch.testing.assert_close(masked, alone @ value[event, kv, kept])


def test_votes_are_plain_or_by_age() -> None:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(1, 2, 4, 3, 8, generator=generator)
    obs = Observation(queries, torch.randn(1, 2, 2, 9, 8, generator=generator), 0.5)
    plain = SpindleKV(window=3).score(obs)
    assert torch.equal(plain, obs.causal("mean"))
    by_age = SpindleKV(window=3, score_norm="age").score(obs)
    torch.testing.assert_close(by_age, plain / torch.arange(9, 3, -1))
    ac = torch.tensor([0.8, 0.6, 0.56, 0.1])
    assert (ac / torch.arange(6, 2, -1)).topk(2).indices.sort().values.tolist() == [0, 2]
    pooled = SpindleKV(window=3, pooling="max", kernel_size=3).score(obs)
    assert (pooled >= plain).all() and not torch.equal(pooled, plain)
