"""Choices of the uneven policies: worked examples, and naive loops over layers and heads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.policies.adakv import AdaKV
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.dynamickv import DynamicKV
from kvserve.engine.policies.keydiff import KeyDiff
from kvserve.engine.policies.pyramidkv import PyramidKV
from kvserve.engine.policies.rkv import RKV
from kvserve.engine.policies.scoring import Observation, pool_scores
from kvserve.engine.policies.snapkv import SnapKV
from kvserve.engine.policies.windowkv import WindowKV
from kvserve.kernels.score.causal_scores import causal_scores, past_scores
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState
from tests.engine.policies.one_row import best, choose_unevenly, places, tied


def random_observation(seed: int) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    queries = 2 * torch.randn(2, 3, 4, 4, 8, generator=generator)
    return Observation(queries, torch.randn(2, 3, 2, 29, 8, generator=generator), 0.5)


# ---- places that are not there ------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(budget=9, window=4),
        SnapKV(budget=9, window=4, pooling="max", scope="past", gqa_reduce="mean"),
        RKV(budget=9, window=4),
        RKV(budget=9, window=4, similarity=-0.5),
        KeyDiff(budget=9, recent=3),
    ],
    ids=str,
)
def test_shorter_lanes_score_as_by_themselves(policy: Policy) -> None:
    obs = random_observation(0)
    assert isinstance(obs.queries, torch.Tensor)
    absent = torch.tensor([[[0, 3], [25, 20], [1, 0]], [[0, 0], [11, 24], [7, 7]]])
    missing = torch.arange(29) < absent[..., None]
    keys = obs.keys.masked_fill(missing[..., None], torch.nan)
    got = policy.score(Observation(obs.queries, keys, 0.5, missing=missing))
    for event, layer, head in np.ndindex(2, 3, 2):
        first = int(absent[event, layer, head])
        scores = got[event, layer, head]
        assert (scores[:first] == -torch.inf).all()
        if first < len(scores):
            queries = obs.queries[event, layer, 2 * head : 2 * head + 2][None, None]
            lane = Observation(queries, keys[event, layer, head, first:][None, None, None], 0.5)
            torch.testing.assert_close(scores[first:], policy.score(lane)[0, 0, 0])


def test_lanes_with_nothing_but_the_window_stay_finite() -> None:
    obs = random_observation(6)
    missing = torch.ones(obs.keys.shape[:-1], dtype=torch.bool)
    assert past_scores(obs.queries, obs.keys, 0.5, missing=missing).isfinite().all()


# ---- PyramidKV ----------------------------------------------------------------------------------


def test_pyramidkv_is_snapkv_with_each_layers_count() -> None:
    policy = PyramidKV(budget=10, window=4, beta=3)
    obs = random_observation(2)
    scores = policy.score(obs)
    snapkv = SnapKV(budget=10, window=4, kernel_size=7, pooling="max")
    assert torch.equal(scores, snapkv.score(obs))
    selection = policy.choose(scores, 29, 10)
    assert selection.counts.tolist() == [[[14] * 2, [10] * 2, [6] * 2]] * 2
    for event in range(2):
        for layer, heads in enumerate(places(selection, event)):
            count = len(heads[0])
            assert heads == snapkv.select(scores, 29, count)[event, layer].tolist()


def test_pyramidkv_in_decode_keeps_no_more_than_a_layer_has() -> None:
    policy = PyramidKV(budget=10, window=2, trigger="threshold", threshold=14)
    scores = tied(2, 2, 16, seed=0)
    scores[1, :, :12] = -torch.inf
    kept = choose_unevenly(policy, scores, 18, 10)
    assert [len(heads[0]) for heads in kept] == [18, 2]
    scores[1, :, :9] = -torch.inf
    assert choose_unevenly(policy, scores, 18, 10) == [
        [list(range(18))] * 2,
        [best(row, 0, 18)[-2:] for row in scores[1].tolist()],
    ]


def test_pyramidkv_counts_stop_at_what_a_layer_has() -> None:
    """Budgets are 24 and 12 before the window; the upper layer has 5."""
    policy = PyramidKV(budget=20, window=2, trigger="threshold", threshold=22)
    scores = torch.rand(1, 2, 2, 24)
    scores[:, 1, :, :19] = -torch.inf
    assert policy.choose(scores, 26, 20).counts.tolist() == [[[26, 26], [7, 7]]]


# ---- Ada-KV -------------------------------------------------------------------------------------

TWO_HEADS = [
    [0.30, 0.20, 0.15, 0.10, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01],
    [0.40, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01],
]


@pytest.mark.parametrize(
    ("base", "heads", "fields", "counts"),
    [
        (4, TWO_HEADS, {"alpha": 0}, [7, 1]),
        (4, TWO_HEADS, {}, [6, 1]),
        (4, TWO_HEADS, {"exact_total": True}, [6, 2]),
        (4, TWO_HEADS, {"normalize": True}, [5, 2]),
        (5, TWO_HEADS, {}, [7, 3]),
        (4, TWO_HEADS, {"alpha": 1}, [4, 4]),
        (2, [[0.5, 0.3, 0.1, 0.05], [0.2, 0.02, 0.02, 0.01]], {"floor": "hard"}, [3, 1]),
        (2, [[0.5, 0.3, 0.1, 0.05], [0.2, 0.02, 0.02, 0.01]], {}, [2, 1]),
        (2, [[0.5, 0.4, 0.3, 0.2], [0.1, 0.0, 0.0, 0.0]], {"floor": "hard"}, [4, 0]),
        (2, [[0.5, 0.4, 0.3, 0.2], [0.1, 0.0, 0.0, 0.0]], {"floor": "hard", "alpha": 0.5}, [3, 1]),
    ],
)
def test_adakv(
    base: int, heads: list[list[float]], fields: dict[str, Any], counts: list[int]
) -> None:
    policy = AdaKV(budget=base + 3, window=3, **fields)
    length = len(heads[0]) + 3
    kept = choose_unevenly(policy, torch.tensor([heads, heads[::-1]]), length, base + 3)
    expected = [best(row, count, length) for row, count in zip(heads, counts, strict=True)]
    assert kept[0] == expected
    if base != 4:  # there the first head wins a tie
        assert kept[1] == expected[::-1]


def naive_adakv(heads: list[list[float]], base: int, alpha: float, floor: str) -> list[int]:
    own = int(base * alpha) if floor == "hard" else 0
    chosen = {(h, j) for h, row in enumerate(heads) for j in best(row, own, len(row))}
    others = [(-x, h, j) for h, row in enumerate(heads) for j, x in enumerate(row)]
    others = [one for one in sorted(others) if one[1:] not in chosen]
    chosen |= {one[1:] for one in others[: len(heads) * base - len(chosen)]}
    counts = [sum(h == head for h, _ in chosen) for head in range(len(heads))]
    if floor == "hard":
        return counts
    return [round(count * (1 - alpha) + int(base * alpha)) for count in counts]


@pytest.mark.parametrize("floor", ["mix", "hard"])
def test_adakv_against_a_naive_loop(floor: str) -> None:
    for seed in range(40):
        scores = tied(2, 3, 4, 17, seed=seed)
        base, alpha = 1 + seed % 9, [0.2, 0.5, 0.75][seed % 3]
        policy = AdaKV(budget=base + 2, window=2, alpha=alpha, floor=floor)
        selection = policy.choose(scores, 19, base + 2)
        for event in range(2):
            for heads, kept in zip(scores[event].tolist(), places(selection, event), strict=True):
                counts = naive_adakv(heads, base, alpha, floor)
                assert kept == [best(row, n, 19) for row, n in zip(heads, counts, strict=True)]


@pytest.mark.parametrize("scorer", [SnapKV, RKV, KeyDiff])
def test_adakv_scores_as_its_scorer(scorer: type[Any]) -> None:
    fields: dict[str, Any] = {} if scorer is KeyDiff else {"window": 4}
    obs = random_observation(3)
    ada = AdaKV(budget=9, scorer={"name": scorer.name, **fields})
    alone = scorer(budget=9, **fields)
    assert torch.equal(ada.score(obs), alone.score(obs))
    assert ada.event_trigger.num_queries == alone.event_trigger.num_queries == (4 if fields else 0)
    assert ada.query_reduction == alone.query_reduction


def test_adakv_names_and_settings_of_scorers() -> None:
    obs = random_observation(4)
    released = SnapKV(budget=9, window=4, kernel_size=7, pooling="max")
    assert torch.equal(AdaKV(budget=9, window=4).score(obs), released.score(obs))
    plain = AdaKV(budget=9, scorer={"name": "snapkv"}, window=4)
    assert torch.equal(plain.score(obs), SnapKV(budget=9, window=4).score(obs))
    assert AdaKV(budget=64).num_queries == 32
    same = AdaKV(budget=9, scorer={"name": "snapkv"}, window=4)
    assert hash(plain) == hash(same) and plain == same != AdaKV(budget=9, window=4)


def test_ada_pyramid() -> None:
    """Layers get PyramidKV's budgets (mean 6: 10, 6, 2), heads their parts of these."""
    policy = AdaKV(budget=10, scorer={"name": "pyramidkv", "beta": 3}, window=4, alpha=0)
    scores = policy.score(random_observation(5))
    counts = policy.choose(scores, 29, 10).counts - 4
    assert counts.sum(-1).tolist() == [[20, 12, 4]] * 2
    assert (counts[..., 0] != counts[..., 1]).any()


@pytest.mark.parametrize("alpha", [0.2, 0.9])
def test_adakv_in_decode_never_exceeds_the_budget(alpha: float) -> None:
    """Lanes hold 5 to 25 of 25 places; their heads' counts add up to the layer's budget.

    The last layer holds less than its budget, and keeps all of it.
    """
    generator = torch.Generator().manual_seed(1)
    policy = AdaKV(budget=8, window=2, trigger="threshold", threshold=10, alpha=alpha)
    scores = tied(1, 6, 4, 23, seed=3)
    there = torch.randint(3, 24, (6, 4), generator=generator)
    there[:, 0] = 23
    there[-1] = torch.tensor([3, 4, 5, 6])
    scores[0].masked_fill_(torch.arange(23) < 23 - there[..., None], -torch.inf)
    counts = policy.choose(scores, 25, 8).counts[0]
    assert (counts <= there + 2).all() and (counts >= 2).all()
    assert counts[-1].tolist() == [5, 6, 7, 8]
    short = 4 * 8 - counts.sum(-1)
    capped = (counts == there + 2).any(-1)
    assert ((short == 0) | (capped & (short > 0))).all() and (short == 0).any()
    for heads, ns, kept in zip(
        scores[0].tolist(), counts.tolist(), places(policy.choose(scores, 25, 8)), strict=True
    ):
        assert kept == [best(row, n - 2, 25) for row, n in zip(heads, ns, strict=True)]


# ---- DynamicKV ----------------------------------------------------------------------------------

D1 = [[[0.30, 0.05, 0.20, 0.10, 0.02, 0.18]], [[0.01, 0.25, 0.02, 0.16, 0.15, 0.03]]]
D2 = [
    [[0.40, 0.35, 0.30, 0.25, 0.03, 0.02]],
    [[0.09, 0.08, 0.07, 0.06, 0.05, 0.04]],
    [[0.28, 0.01, 0.26, 0.02, 0.03, 0.04]],
    [[0.01, 0.085, 0.075, 0.01, 0.01, 0.02]],
]


def test_dynamickv_examples() -> None:
    policy = DynamicKV(budget=3, window=1, interval=1, max_ratio=3)
    assert choose_unevenly(policy, torch.tensor(D1), 7, 3) == [[[0, 1 + 1, 5, 6]], [[1, 6]]]
    # What the first round took of layer 1 does not come back, so 7 of 8 are used.
    policy = DynamicKV(budget=3, window=1, interval=2, max_ratio=2)
    kept = [[[0, 1, 2, 3, 6]], [[6]], [[0, 2, 6]], [[1, 6]]]
    assert choose_unevenly(policy, torch.tensor(D2), 7, 3) == kept
    once = DynamicKV(budget=3, window=1, interval=4, max_ratio=2)
    assert once.layer_budgets(torch.tensor([D2]), 2).tolist() == [[4, 1, 2, 1]]


def test_dynamickv_pooling_and_groups() -> None:
    votes = torch.tensor([6.0, 0, 3, 0, 9, 0])
    assert pool_scores(votes, 3, "avg").tolist() == [2, 3, 1, 4, 3, 3]
    assert pool_scores(votes, 3, "max").tolist() == [6, 6, 3, 9, 9, 9]
    assert best(pool_scores(votes, 3, "avg").tolist(), 2, 6) == [1, 3]
    assert best(pool_scores(votes, 3, "max").tolist(), 2, 6) == [3, 4]
    grouped = {"mean": [2.0, 2.0, 2.5], "max": [4.0, 4.0, 3.0]}
    probs = torch.tensor([[4.0, 0, 2, 1], [0, 4, 3, 0]]).clamp(min=1e-30) / 7
    obs = Observation(probs.log()[None, None, :, None], torch.eye(4)[None, None, None], 1.0)
    for reduce, expected in grouped.items():
        policy = DynamicKV(budget=2, window=1, kernel_size=1, gqa_reduce=reduce)
        torch.testing.assert_close(policy.score(obs)[0, 0, 0] * 7, torch.tensor(expected))


def naive_dynamickv(scores: list[list[list[float]]], base: int, policy: DynamicKV) -> list[int]:
    layers, heads, n = len(scores), len(scores[0]), len(scores[0][0])
    held: list[int] = []
    for done in range(1, layers + 1):
        held.append(min(math.floor(policy.max_ratio * base), n))
        if done % policy.interval and done < layers:
            continue
        count = base * heads * done
        flat = [
            (-x, i, h, j)
            for i in range(done) for h in range(heads) for j, x in enumerate(scores[i][h])
        ]  # fmt: skip
        chosen = [one[1] for one in sorted(flat)[:count]]
        shares = [base * layers * chosen.count(i) // count for i in range(done)]
        shares[-1] += base * layers - sum(shares)
        held = [min(a, b) for a, b in zip(held, shares, strict=True)]
    return held


def test_dynamickv_against_a_naive_loop() -> None:
    for seed in range(40):
        layers, base = 1 + seed % 7, 1 + seed % 4
        scores = tied(2, layers, 2, 15, seed=seed) ** 3 * torch.rand(2, layers, 1, 1)
        policy = DynamicKV(
            budget=base + 2, window=2, interval=1 + seed % 3, max_ratio=[1, 1.7, 4, 99][seed % 4]
        )
        selection = policy.choose(scores, 17, base + 2)
        for event in range(2):
            held = naive_dynamickv(scores[event].tolist(), base, policy)
            assert sum(held) <= base * layers
            expected = [
                [best(row, n, 17) for row in heads]
                for heads, n in zip(scores[event].tolist(), held, strict=True)
            ]
            assert places(selection, event) == expected


# ---- WindowKV -----------------------------------------------------------------------------------

E1 = [1.0, 2, 3, 4, 0, 8, 0, 0, 2, 2]


class Votes:
    """An observation in which each query head [E, L', Hq, n] has voted already."""

    def __init__(self, votes: Tensor, kv_heads: int, window: int) -> None:
        self.votes = self.queries = votes
        self.keys = torch.zeros(*votes.shape[:2], kv_heads, votes.shape[-1] + window, 1)

    def causal(self, gqa_reduce: str) -> Tensor:
        return self.votes

    def all_heads(self, x: Tensor) -> Tensor:
        return x


def windowkv(review: int, **fields: Any) -> WindowKV:
    """A policy of one group whose layers keep ``review`` entries before a window of 2."""
    policy = WindowKV(budget=review + 2, window=2, **fields).for_model(1, 16)
    assert isinstance(policy, WindowKV)
    return policy


@pytest.mark.parametrize(
    ("task", "worth", "review", "kept"),
    [
        ("localization", [2.5, 2.0, 2.0], 10, range(10)),
        ("localization", [2.5, 2.0, 2.0], 5, range(4)),
        ("localization", [2.5, 2.0, 2.0], 6, range(8)),
        ("localization", [2.5, 2.0, 2.0], 1, []),
        ("aggregation", [3.5, 4.0, 2.0], 10, range(10)),
        ("aggregation", [3.5, 4.0, 2.0], 5, range(4, 8)),
        ("aggregation", [3.5, 4.0, 2.0], 6, range(8)),
        ("aggregation", [3.5, 4.0, 2.0], 1, []),
    ],
)
def test_windowkv(task: str, worth: list[float], review: int, kept: Any) -> None:
    policy = windowkv(review, task=task, chunk_size=4)
    scores = policy.score(Votes(torch.tensor([[[E1]]]), 1, 2))  # type: ignore[arg-type]
    assert scores[0, 0, 0].tolist() == [worth[j // 4] for j in range(10)]
    assert places(policy.choose(scores, 12, 0)) == [[[*kept, 10, 11]]]


def test_windowkv_ranks_within_heads_first() -> None:
    votes = torch.tensor([[[[4.0, 0, 3, 3], [0, 4, 3, 3]]]])
    policy = windowkv(2, chunk_size=2, best=1)
    scores = policy.score(Votes(votes, 2, 2))  # type: ignore[arg-type]
    assert scores[0, 0].tolist() == [[4, 4, 3, 3]] * 2
    assert places(policy.choose(scores, 6, 0)) == [[[0, 1, 4, 5]] * 2]


def test_windowkv_votes_are_probabilities_over_all_keys() -> None:
    keys = torch.log(torch.tensor([1.0, 2, 3, 1]))[:, None]
    mean = causal_scores(torch.ones(1, 2, 1), keys[None], 1.0, "none")
    torch.testing.assert_close(mean, torch.tensor([[13 / 84, 26 / 84]]))


def naive_windowkv(
    heads: list[list[float]], review: int, size: int, best_of: int, newest: int
) -> list[int]:
    n = len(heads[0])
    windows = [range(at, min(at + size, n)) for at in range(0, n, size)]
    worth = []
    for window in windows:
        count = min(best_of, len(window))
        tops = [sorted((row[j] for j in window), reverse=True)[:count] for row in heads]
        worth.append(sum(sum(top) / count for top in tops) / len(heads))
    keep = max(len(windows) - max(math.ceil((n - review) / size), 0), 0)
    chosen = best(worth, keep, len(worth))
    return [j for at in chosen for j in windows[at]] + list(range(n, n + newest))


def test_windowkv_against_a_naive_loop() -> None:
    """Six layers in groups of two: leaders alone are scored, and each group has its budget."""
    for seed in range(40):
        size, best_of, scored = 1 + seed % 5, 1 + seed % (1 + seed % 5), 12 + seed % 7
        policy = WindowKV(
            budget=9, window=3, chunk_size=size, best=best_of, reuse_layers=2, pyramid=3
        ).for_model(6, 16)
        assert isinstance(policy, WindowKV)
        budgets = policy.group_budgets(3)
        assert policy.leaders(6) == [0, 0, 2, 2, 4, 4] and budgets == [8, 6, 4]
        votes = 960 * tied(2, 3, 4, scored, seed=seed)  # means stay whole numbers
        scores = policy.score(Votes(votes, 2, 3))  # type: ignore[arg-type]
        selection = policy.choose(scores, scored + 3, 0)
        for event in range(2):
            for group, heads in enumerate(places(selection, event)):
                naive = naive_windowkv(
                    votes[event, group].tolist(), budgets[group], size, best_of, 3
                )
                assert heads == [naive] * 2
                short = (scored - 1) % size + 1
                assert budgets[group] - size < len(naive) - 3 <= budgets[group] + size - short


def test_windowkv_fires_where_any_layer_is_cut() -> None:
    """Groups keep 8, 6 and 4 before a window of 3: a prompt of 7 fits all of them."""
    policy = WindowKV(budget=9, window=3, reuse_layers=2, pyramid=3).for_model(6, 16)
    prompts = np.array([3, 6, 7, 8, 100], np.int32)
    zero = np.zeros_like(prompts)
    due = policy.event_trigger.next_event(RowState(prompts, zero, zero, zero)).tolist()
    assert due == [NO_EVENT, NO_EVENT, NO_EVENT, 8, 100]
    assert policy.event_trigger.num_queries == 3


def test_windowkv_for_a_model() -> None:
    base = WindowKV(budget=1056)
    for layers, size in ((32, 8), (28, 7), (2, 1), (1, 1), (6, 1), (7, 1), (24, 6)):
        policy = base.for_model(layers, 16)
        assert isinstance(policy, WindowKV)
        assert policy.reuse_layers == size and policy.task == "localization"
        assert policy.protected == 16 and policy.for_model(layers, 16) == policy
    asked = WindowKV(budget=1056, task="aggregation").for_model(32, 16)
    assert isinstance(asked, WindowKV)
    assert asked.protected == 32 and asked.group_budgets(4) == [1463, 1171, 879, 585]
    with pytest.raises(PolicyError, match="divisor of the model's 30") as refused:
        WindowKV(budget=64, reuse_layers=4).for_model(30, 16)
    assert refused.value.argument == "reuse_layers"
    with pytest.raises(PolicyError, match="at most 6 "):
        WindowKV(budget=64, reuse_layers=8, pyramid=3).for_model(32, 16)
    assert asked.caution == ""
    small = WindowKV(budget=40, reuse_layers=1).for_model(8, 16)
    assert small.caution == "may keep no window in upper layers"
    large = WindowKV(budget=400, reuse_layers=16).for_model(32, 16)
    assert large.caution == "keeps more in upper layers"
