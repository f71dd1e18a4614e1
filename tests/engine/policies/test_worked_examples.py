"""Scores and choices of the policies that cut whole rows, on numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.chunkkv import ChunkKV
from kvserve.engine.policies.h2o import H2O
from kvserve.engine.policies.keydiff import KeyDiff
from kvserve.engine.policies.rkv import RKV
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.snapkv import SnapKV
from kvserve.engine.policies.streaming_llm import StreamingLLM
from kvserve.kernels.score.causal_scores import received_mass
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd, WhenOver
from tests.engine.policies.one_row import choose, follow, observe


def attention(rows: list[list[list[float]]]) -> Observation:
    """Queries whose probabilities are ``rows`` [heads, W, n], for one KV head."""
    probs = torch.tensor(rows)
    return observe(probs.clamp(min=1e-30).log(), torch.eye(probs.shape[-1])[None])


# ---- SnapKV -------------------------------------------------------------------------------------

HEADS = ([0.1, 0.4, 0.1, 0.1], [0.3, 0.0, 0.1, 0.2])


def snapkv_example() -> Observation:
    """Each window query gives the past what ``HEADS`` says, and itself the rest."""
    rest = [1 - sum(past) for past in HEADS]
    return attention([
        [[*past, mine, 0.0], [*past, 0.0, mine]] for past, mine in zip(HEADS, rest, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("pooling", "scores", "kept"),
    [
        ("none", [0.2, 0.2, 0.1, 0.15], [0, 1, 4, 5]),
        ("avg", [0.1333, 0.1667, 0.15, 0.0833], [1, 2, 4, 5]),
        ("max", [0.2, 0.2, 0.2, 0.15], [0, 1, 4, 5]),
    ],
)
def test_snapkv(pooling: str, scores: list[float], kept: list[int]) -> None:
    policy = SnapKV(budget=4, window=2, kernel_size=3, pooling=pooling)
    obs = snapkv_example()
    got = policy.score(obs)[0, 0, 0]
    torch.testing.assert_close(got, torch.tensor(scores), atol=1e-4, rtol=0)
    assert policy.select(got.mul(1e4).round(), 6, 4).tolist() == kept


def test_snapkv_scopes_choose_differently() -> None:
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.8, 0.8], [0.0, 0.0]]])
    obs = observe(torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]]), keys, 1 / math.sqrt(2))
    fields: dict[str, Any] = {"budget": 2, "window": 1, "pooling": "none"}
    assert choose(SnapKV(**fields, scope="past"), obs, 2) == [[0, 3]]
    assert choose(SnapKV(**fields), obs, 2) == [[2, 3]]
    assert choose(SnapKV(**fields, scope="past", gqa_reduce="mean"), obs, 2) == [[2, 3]]


def test_snapkv_with_a_window_of_all_but_one_keeps_all() -> None:
    obs = observe(torch.randn(2, 5, 4), torch.randn(1, 6, 4))
    assert choose(SnapKV(budget=6, window=5), obs, 6) == [[0, 1, 2, 3, 4, 5]]


def test_the_threshold_fires_on_length() -> None:
    """Prompt 6, budget 8, threshold 12: decode steps 6, 10 and 14, each from 12 to 8."""
    fields: dict[str, Any] = {"budget": 8, "window": 2, "trigger": "threshold", "threshold": 12}
    policy = SnapKV(**fields, protect_prompt=False)
    events, history = follow(policy, torch.zeros(21, 4), num_prompt=6)
    assert events == [12, 16, 20]
    assert [len(history[at]) for at in (11, 12, 15, 16)] == [12, 9, 12, 9]
    # A protected prompt does not count: 12 generated ones are needed, and stay apart from it.
    events, history = follow(SnapKV(**fields), torch.zeros(23, 4), num_prompt=6)
    assert events == [18, 22]
    assert history[-1][:6] == list(range(6)) and len(history[-1]) == 6 + 8 + 1


def test_a_long_prompt_is_cut_at_its_end() -> None:
    policy = SnapKV(budget=8, window=2, trigger="threshold", threshold=12, protect_prompt=False)
    assert follow(policy, torch.zeros(26, 4), num_prompt=20)[0] == [20, 24]
    once = SnapKV(budget=8, window=2)
    events, history = follow(once, torch.zeros(40, 4), num_prompt=20)
    assert events == [20] and len(history[-1]) == 8 + 20


# ---- budgets and triggers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "length", "kept"),
    [
        (SnapKV(ratio=0.2, window=8), 200, 40),  # 39 in binary floats of the removed fraction
        (SnapKV(ratio="1/3", window=8), 100, 33),
        (SnapKV(ratio="1/3", window=8), 20, 9),  # the window and one more
        (SnapKV(ratio=0.1, window=8), 9, 9),
        (SnapKV(ratio=1, window=8), 77, 77),
        (KeyDiff(ratio=0.1), 10, 1),
        (KeyDiff(ratio=0.1), 9, 1),
        (ChunkKV(ratio=0.1), 205, 21),  # 20.5 rounds up
        (ChunkKV(ratio=0.1), 204, 20),
        (ChunkKV(ratio=0.1), 100, 18),  # the window and one chunk
        (ChunkKV(ratio=0.1), 11, 11),
    ],
)
def test_ratios_are_exact(policy: Policy, length: int, kept: int) -> None:
    trigger = policy.event_trigger
    assert isinstance(trigger, AtPrefillEnd)
    assert trigger.budget.of(np.array([length])).tolist() == [kept]


def test_defaults_of_the_threshold() -> None:
    default, rkv = SnapKV(budget=1024, trigger="threshold"), RKV(budget=128)
    assert default.event_trigger.limit == 1152  # type: ignore[attr-defined]
    assert rkv.event_trigger.limit == 256  # type: ignore[attr-defined]
    paper = SnapKV(budget=1025, trigger="threshold", threshold=1280, protect_prompt=False)
    assert paper.event_trigger == WhenOver(1280, 1025, 32, protect_prompt=False, intact=32)


# ---- ChunkKV ------------------------------------------------------------------------------------

X1 = [9, 1, 1, 1, 2, 2, 2, 2, 1, 0, 1, 0, 5, 5, 3, 1, 4, 2, 3, 3]
X2 = [9, 1, 1, 1, 2, 2, 2, 2, 1, 0, 1, 0, 5, 4, 1, 1, 5, 5]


@pytest.mark.parametrize(
    ("scores", "chunk_reduce", "keep", "kept"),
    [
        (X1, "sum", 11, [0, 1, 2, 3, 12, 13, 14, 15, 20, 21, 22]),
        (X1, "sum", 14, [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]),
        (X2, "sum", 11, [0, 1, 2, 3, 12, 13, 14, 15, 18, 19, 20]),
        (X2, "mean", 9, [0, 1, 2, 3, 16, 17, 18, 19, 20]),
        (X2, "mean", 11, [0, 1, 2, 3, 12, 13, 16, 17, 18, 19, 20]),
    ],
)
def test_chunkkv(scores: list[int], chunk_reduce: str, keep: int, kept: list[int]) -> None:
    policy = ChunkKV(budget=keep, window=3, chunk_size=4, chunk_reduce=chunk_reduce)
    assert policy.select(torch.tensor(scores).float(), len(scores) + 3, keep).tolist() == kept


def test_chunkkv_scores_probabilities_not_logits() -> None:
    keys = torch.zeros(1, 8, 4)
    keys[0, :, 0] = torch.log(torch.tensor([3.0, 3.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0]))
    queries = torch.zeros(1, 2, 4)
    queries[..., 0] = 2.0
    policy = ChunkKV(budget=4, window=2, chunk_size=2)
    assert choose(policy, observe(queries, keys, 0.5), 4) == [[2, 3, 6, 7]]


@pytest.mark.parametrize(("mode", "kept"), [("shared", [0, 0]), ("kv_head", [0, 2])])
def test_chunkkv_heads_vote_together_or_alone(mode: str, kept: list[int]) -> None:
    """Chunk scores 5 1 0 and 0 1 4.5: the sum is 5 2 4.5."""

    class Given:
        def causal(self, gqa_reduce: str) -> Tensor:
            chunks = torch.tensor([[5.0, 1.0, 0.0], [0.0, 1.0, 4.5]])
            return chunks.repeat_interleave(2, dim=-1)[None, None] / 2

        def all_heads(self, x: Tensor) -> Tensor:
            return x

    policy = ChunkKV(budget=3, window=1, chunk_size=2, head_mode=mode)
    got = policy.select(policy.score(Given()), 7, 3)  # type: ignore[arg-type]
    assert got[0, 0].tolist() == [[2 * chunk, 2 * chunk + 1, 6] for chunk in kept]


def test_chunkkv_layers_follow_their_leader() -> None:
    assert ChunkKV(budget=30, reuse_layers=3).leaders(8) == [0, 0, 0, 3, 3, 3, 6, 6]
    assert ChunkKV(budget=30).leaders(3) == [0, 1, 2]
    assert ChunkKV(budget=30, reuse_layers=99).leaders(3) == [0, 0, 0]


def test_chunks_of_one_are_snapkv_without_pooling() -> None:
    obs = observe(torch.randn(6, 3, 8), torch.randn(2, 20, 8))
    chunks = ChunkKV(budget=9, window=3, chunk_size=1, head_mode="kv_head")
    assert choose(chunks, obs, 9) == choose(SnapKV(budget=9, window=3, pooling="none"), obs, 9)


# ---- R-KV ---------------------------------------------------------------------------------------

RKV_KEYS = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.05], [0.7, 0.7]]])


@pytest.mark.parametrize(
    ("mix_lambda", "scores", "kept"),
    [
        (0.07, [-0.2048, -0.2112, -0.1375, -0.1770], [0, 2, 3, 4]),
        (1.0, [0.2482, 0.2645, 0.2312, 0.2562], [0, 1, 3, 4]),
    ],
)
def test_rkv(mix_lambda: float, scores: list[float], kept: list[int]) -> None:
    obs = observe(torch.tensor([[[1.0, 0.9]]]), RKV_KEYS, 1 / math.sqrt(2))
    policy = RKV(budget=4, window=1, kernel_size=1, mix_lambda=mix_lambda)
    torch.testing.assert_close(policy.score(obs)[0, 0, 0], torch.tensor(scores), atol=1e-4, rtol=0)
    assert choose(policy, obs, 4) == [kept]


def test_rkv_without_redundancy_is_snapkv_over_the_past() -> None:
    torch.manual_seed(1)
    obs = observe(torch.randn(8, 4, 8), torch.randn(2, 30, 8))
    snapkv = SnapKV(budget=12, window=4, kernel_size=7, pooling="max", scope="past")
    assert choose(RKV(budget=12, window=4, mix_lambda=1), obs, 12) == choose(snapkv, obs, 12)


@pytest.mark.parametrize(
    ("num_prompt", "protect", "events"),
    [
        (5, False, [14, 18, 22]),
        (11, False, [11, 15, 19, 23]),  # above the budget of 10, below the threshold of 14
        (10, False, [14, 18, 22]),
        (5, True, [19, 23]),
    ],
)
def test_rkv_cuts_a_prompt_above_its_budget(
    num_prompt: int, protect: bool, events: list[int]
) -> None:
    policy = RKV(budget=10, threshold=14, window=2, protect_prompt=protect)
    assert follow(policy, torch.randn(24, 4), num_prompt)[0] == events


# ---- KeyDiff ------------------------------------------------------------------------------------

KEYDIFF_KEYS = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [1.0, 0.2]])


def test_keydiff() -> None:
    obs = observe(torch.zeros(1, 0, 2), KEYDIFF_KEYS[None])
    policy = KeyDiff(budget=2)
    expected = torch.tensor([-0.9156, -0.9544, -0.4022, -0.9767])
    torch.testing.assert_close(policy.score(obs)[0, 0, 0], expected, atol=1e-4, rtol=0)
    assert choose(policy, obs, 2) == [[0, 2]]
    assert choose(KeyDiff(budget=2, recent=1), obs, 2) == [[2, 3]]
    assert choose(KeyDiff(budget=3, recent=1), obs, 3) == [[0, 2, 3]]


@pytest.mark.parametrize("block", [1, 2])
def test_keydiff_in_blocks(block: int) -> None:
    policy = KeyDiff(budget=2, mode="block", block=block)
    keys = torch.cat([KEYDIFF_KEYS, torch.zeros(1, 2)])
    _, history = follow(policy, keys, num_prompt=4)
    assert history[-1] == [0, 2, 4]
    assert max(map(len, history)) <= 2 + block


def test_keydiff_blocks_end_at_their_multiples_and_at_the_prompt() -> None:
    policy = KeyDiff(budget=10, mode="block", block=8, trigger="threshold", threshold=16)
    events, history = follow(policy, torch.randn(50, 4), num_prompt=35)
    assert events == [16, 24, 32, 35, 41, 47]
    assert max(map(len, history)) == 10 + 8
    only = KeyDiff(budget=10, mode="block", block=8)
    assert follow(only, torch.randn(50, 4), num_prompt=35)[0] == [16, 24, 32, 35]
    short = only.event_trigger.next_event(
        RowState(np.array([10]), np.zeros(1, int), np.zeros(1, int), np.zeros(1, int))
    )
    assert short.tolist() == [NO_EVENT]


def test_one_block_over_is_the_same_as_once() -> None:
    keys = torch.randn(21, 4)
    once = follow(KeyDiff(budget=16), keys, num_prompt=20)[1]
    assert follow(KeyDiff(budget=16, mode="block", block=20), keys, num_prompt=20)[1] == once


# ---- StreamingLLM -------------------------------------------------------------------------------


def test_streaming_llm() -> None:
    policy = StreamingLLM(budget=6, sinks=2)
    obs = observe(torch.zeros(1, 0, 2), torch.zeros(1, 10, 2))
    assert choose(policy, obs, 6) == [[0, 1, 6, 7, 8, 9]]
    _, history = follow(policy, torch.zeros(30, 2), num_prompt=9)
    for held in history[:9]:
        assert held == list(range(len(held)))
    for position, held in enumerate(history[9:], start=9):
        assert held == [0, 1, *range(position - 3, position + 1)]


@pytest.mark.parametrize(("sinks", "period"), [(0, 1), (0, 5), (2, 3), (5, 1)])
def test_streaming_llm_never_exceeds_its_budget(sinks: int, period: int) -> None:
    policy = StreamingLLM(budget=6, sinks=sinks, period=period)
    _, history = follow(policy, torch.zeros(40, 2), num_prompt=3)
    for position, held in enumerate(history):
        newest = len(held) - sinks
        assert len(held) == position + 1 <= 6 or 6 - period < len(held) <= 6
        if position >= 6:
            assert held == [*range(sinks), *range(position + 1 - newest, position + 1)]


def test_h2o_worked_example() -> None:
    """Column sums pick heavy hitters; survivors keep their mass and go on gaining."""
    rows = [[1.0], [0.5, 0.5], [0.3, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]
    mass = torch.tensor([sum(row[j] for row in rows if j < len(row)) for j in range(4)])
    torch.testing.assert_close(mass, torch.tensor([2.0, 1.1, 0.8, 0.1]))
    policy = H2O(budget=3, recent=1)
    assert policy.select(mass, 4, 3).tolist() == [0, 1, 3]
    later = torch.tensor([2.0, 1.1, 0.1, 0.0]) + torch.tensor([0.1, 0.2, 0.5, 0.2])
    assert policy.select(later, 4, 3).tolist() == [0, 1, 3]  # positions 0, 1 and 4


def test_h2o_mass_equals_a_naive_loop_and_adds_up() -> None:
    heads, group, length, dim = 2, 3, 7, 4
    query, key = torch.randn(heads * group, length, dim), torch.randn(heads, length, dim)
    expected = torch.zeros(heads, length)
    for h in range(heads * group):
        for i in range(length):
            seen = query[h, i] @ key[h // group, : i + 1].T * 0.5
            expected[h // group, : i + 1] += torch.softmax(seen, dim=-1)
    for block in (1, 3, 100):
        got = received_mass(query, key, 0.5, block=block)
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(got.sum(-1), torch.full((heads,), float(group * length)))
    earlier = torch.rand(1, 1, heads, length - 1)
    obs = Observation(query[None, None, :, -1:], key[None, None], 0.5, earlier)
    last = received_mass(query[:, -1:], key, 0.5)
    last[:, :-1] += earlier[0, 0]
    torch.testing.assert_close(obs.accumulated_mass()[0, 0], last)
