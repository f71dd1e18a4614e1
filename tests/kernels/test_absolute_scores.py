"""Scores over all that queries saw, and of queries in 4 bits: every combination against loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS
from kvserve.kernels.checks import AGGREGATES, GQA_REDUCTIONS, GROUP_AGGREGATES
from kvserve.kernels.score.causal_scores import causal_scores, over_group, past_scores
from kvserve.kernels.score.seen import Seen
from kvserve.kernels.score.window_scores import (
    window_scores,
    window_scores_cpu,
    window_scores_torch,
)
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.kernels.store.int4_log import Int4Queries, quantize
from kvserve.kernels.store.quantized_entries import LevelKeys
from kvserve.kernels.store.quantized_entries import quantize as quantize_entries

SCALE = 0.3
COMBINATIONS = list(product(AGGREGATES, GROUP_AGGREGATES))


def attention_of(q: Tensor, keys: Tensor, own: int, recent: int) -> tuple[Tensor, float]:
    """What a query at place ``own`` of all ``keys`` gives each of them, and the newest's share."""
    logits = (keys[: own + 1] @ q) * SCALE
    probs = torch.softmax(logits, dim=0)
    return probs, float(probs[own + 1 - recent :].sum().log())


@pytest.mark.parametrize(("aggregate", "group_aggregate"), COMBINATIONS)
@pytest.mark.parametrize(
    ("first", "step", "absolute"), [(0, 1, False), (0, 1, True), (8, 1, True), (1, 2, True)]
)
def test_against_a_loop(
    aggregate: str, group_aggregate: str, first: int, step: int, absolute: bool
) -> None:
    """With exact queries a share says what the softmax over everything would: nothing is lost."""
    before, n, later, dim, group = 20, 8, 4, 8, 3
    places = range(first, n + later, step)
    keys = torch.randn(2, before + n + later, dim) * 2
    q = torch.randn(2 * group, len(places), dim) * 2
    shares, expected = torch.empty(q.shape[:2]), torch.zeros(2, n)
    for h in range(2):
        heads = []
        for member in range(h * group, (h + 1) * group):
            rows = []
            for i, place in enumerate(places):
                recent = place - place // n * n + 1
                _, shares[member, i] = attention_of(q[member, i], keys[h], before + place, recent)
                # All it saw, and what came after it; or the window alone.
                some = keys[h] if absolute else keys[h, before : before + n]
                probs = torch.softmax(some @ q[member, i] * SCALE, dim=0)
                rows.append(probs[before : before + n] if absolute else probs)
            stacked = torch.stack(rows)
            heads.append(
                {
                    "sum": stacked.sum(0),
                    "sum_squares": stacked.square().sum(0),
                    "max": stacked.amax(0),
                }[aggregate]
            )
        pooled = torch.stack(heads)
        expected[h] = {
            "mean": pooled.mean(0),
            "max": pooled.amax(0),
            "rms": pooled.square().mean(0).sqrt(),
        }[group_aggregate]
    seen = Seen(shares, n, first, step, later) if absolute else None
    behind = keys[:, before:] if absolute else keys[:, before : before + n]
    found = window_scores_torch(q, behind, SCALE, aggregate, group_aggregate, seen)
    torch.testing.assert_close(found, expected)


def test_rounding_that_moves_all_logits_alike_moves_no_score() -> None:
    """What a log-sum-exp of exact queries could not say (keys that share a direction)."""
    torch.manual_seed(1)
    keys = torch.randn(1, 40, 16) + 6 * torch.eye(16)[0]
    q = torch.randn(1, 12, 16)
    shares = torch.empty(1, 12)
    for i in range(12):
        _, shares[0, i] = attention_of(q[0, i], keys[0], 28 + i, i + 1)
    moved = q + 0.4 * torch.eye(16)[0]
    keys_alike = keys.clone()
    keys_alike[..., 0] = 6
    exact, found = (
        window_scores_torch(x, keys_alike[:, 28:], SCALE, seen=Seen(shares, 12)) for x in (q, moved)
    )
    torch.testing.assert_close(found, exact)


def test_a_query_that_looks_elsewhere_does_not_vote() -> None:
    torch.manual_seed(2)
    q, keys = torch.randn(1, 2, 8), torch.randn(1, 6, 8)
    for away in (-30.0, -65504.0):
        shares = torch.tensor([[away, 0.0]])
        found = window_scores_torch(q, keys, SCALE, seen=Seen(shares, 6, first=4))
        alone = window_scores_torch(q[:, 1:], keys, SCALE, seen=Seen(shares[:, 1:], 6, first=5))
        torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


def case(
    dim: int, window: int, n: int, later: int, group: int, dtype: torch.dtype = torch.float32
) -> tuple[Int4Queries, Tensor]:
    """Lanes in the order in which they are gathered, [L, heads, E, S, D], seen event by event."""
    torch.manual_seed(0)
    q = torch.randn(2, 2 * group, 3 * window, dim)
    packed = quantize(q, -torch.rand(q.shape[:-1]) * 4)
    parts = (x.unflatten(2, (3, window)).transpose(1, 2).transpose(0, 1) for x in packed)
    k = torch.randn(2, 2, 3 * (n + later), dim).to(dtype)
    k = k.unflatten(2, (3, n + later)).transpose(1, 2).transpose(0, 1)
    return Int4Queries(*parts), k


SHAPES = [(32, 20, 15, 5, 3), (16, 70, 66, 4, 1), (64, 9, 130, 0, 2)]


def views(query: Int4Queries, window: int, n: int, later: int) -> list[Seen | None]:
    """All attention, and queries at several places."""
    step = 2 if 2 * window <= n + later else 1
    last = n + later - window
    return [None, Seen(query.shares, n, 0, 1, later), Seen(query.shares, 7, last % step, step, 0)]


def as_levels(key: Tensor) -> LevelKeys:
    """Keys as the cache holds them in 8 bits."""
    held = quantize_entries(key, FORMATS["int8"].key)
    return LevelKeys(held.levels.view(torch.int8), held.step.float())


@pytest.mark.compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("aggregate", "group_aggregate"), COMBINATIONS)
def test_compiled(
    aggregate: str, group_aggregate: str, dtype: torch.dtype, shape: tuple[int, int, int, int, int]
) -> None:
    """Levels of 8 bits are scored as the numbers that they stand for."""
    _, window, n, later, _ = shape
    held: Tensor | LevelKeys
    q, held = case(*shape, torch.float32 if dtype is torch.int8 else dtype)
    k = held
    if dtype is torch.int8:
        held = as_levels(k)
        k = held.float()
    for seen in views(q, window, n, later):
        how = SCALE, aggregate, group_aggregate, seen
        found, expected = window_scores_cpu(q, held, *how), window_scores_torch(q, k, *how)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        assert dtype is not torch.int8 or torch.equal(found, window_scores(q, held, *how))


@pytest.mark.compiler
def test_threads_change_nothing(set_threads: Callable[[int], None]) -> None:
    q, k = case(32, 20, 15, 5, 3)
    seen, found = Seen(q.shares, 15, later=5), []
    for count in (1, 3):
        set_threads(count)
        found.append(window_scores_cpu(q, k, SCALE, "sum_squares", "mean", seen))
    assert torch.equal(*found)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("aggregate", "group_aggregate", "shape"),
    [
        *(("sum", "max", SHAPES[0]), ("sum_squares", "mean", SHAPES[0]), ("max", "rms", SHAPES[0])),
        *(pytest.param(*how, SHAPES[0], marks=pytest.mark.slow) for how in COMBINATIONS),
        pytest.param("sum_squares", "mean", SHAPES[1], marks=pytest.mark.slow),
    ],
)
def test_triton(
    aggregate: str, group_aggregate: str, shape: tuple[int, int, int, int, int]
) -> None:
    """Several tiles for Kara's default; interpreted, they take fifteen seconds."""
    _, window, n, later, _ = shape
    q, k = case(*shape)
    for seen in views(q, window, n, later):
        how = k[:2], SCALE, aggregate, group_aggregate
        part = Int4Queries(*(x[:2] for x in q))
        seen = seen and seen._replace(shares=seen.shares[:2])
        for query in (part, part.float()):
            found = window_scores_triton(query, *how, seen)
            torch.testing.assert_close(found, window_scores_torch(query, *how, seen))


@pytest.mark.usefixtures("device")
def test_refusals() -> None:
    q, k = case(16, 8, 6, 2, 1)
    for seen in (
        Seen(q.shares[..., :1], 6),
        Seen(q.shares, 6, first=1),
        Seen(q.shares, 0),
        Seen(q.shares, 6, later=9),
    ):
        with pytest.raises(ValueError, match="do not go with query"):
            window_scores_triton(q, k, SCALE, seen=seen)
    with pytest.raises(ValueError, match="group_aggregate must be one of"):
        window_scores_triton(q, k, SCALE, "sum", "sum")


# ---- scores of the entries before the window ----------------------------------------------------


@pytest.mark.parametrize("reduce", GQA_REDUCTIONS)
@pytest.mark.parametrize("missing", [0, 3])
def test_earlier_entries(reduce: str, missing: int) -> None:
    """Some of what the queries saw is not observed; some lanes are shorter."""
    torch.manual_seed(3)
    unseen, past, window, group, dim = 10, 9, 4, 2, 8
    keys = torch.randn(2, unseen + past + window, dim) * 2
    q = torch.randn(2 * group, window, dim) * 2
    shares = torch.empty(q.shape[:2])
    probs = torch.zeros(2, group, window, past)
    gone = torch.zeros(2, past + window, dtype=torch.bool)
    gone[1, :missing] = True
    for h, member, i in product(range(2), range(group), range(window)):
        there = torch.cat([keys[h, :unseen], keys[h, unseen:][~gone[h]]])
        own = len(there) - window + i
        given, shares[h * group + member, i] = attention_of(
            q[h * group + member, i], there, own, i + 1
        )
        probs[h, member, i, int(gone[h].sum()) :] = given[unseen : own - i]
    seen = keys[:, unseen:], SCALE
    absent = gone if missing else None
    found = causal_scores(q, *seen, reduce, absent, shares)
    torch.testing.assert_close(found, over_group(probs.mean(2), reduce, 1))
    found = past_scores(q, *seen, reduce, absent, shares)
    torch.testing.assert_close(found, over_group(probs, reduce, 1).mean(1))
    by_head = causal_scores(q, *seen, "none", absent, shares)
    torch.testing.assert_close(by_head, probs.mean(2).flatten(0, 1))
