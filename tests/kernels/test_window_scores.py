"""Window scores against the spec's worked numbers and a naive loop."""

from __future__ import annotations

import math

import pytest
import torch

from kvserve.kernels.window_scores import AGGREGATES, window_scores

KEYS = torch.tensor([[[0.0], [math.log(2)], [math.log(3)]]])
QUERIES = torch.tensor([[[1.0], [0.0], [-1.0], [1.0]], [[0.0]] * 4])


def test_worked_example() -> None:
    heads = window_scores(QUERIES, KEYS, scale=1.0)
    torch.testing.assert_close(heads, torch.tensor([[1.2727, 1.3030, 1.4242]]), atol=1e-4, rtol=0)
    mean = window_scores(QUERIES.mean(0, keepdim=True), KEYS, scale=1.0)
    torch.testing.assert_close(mean, torch.tensor([[1.2534, 1.3250, 1.4215]]), atol=1e-4, rtol=0)
    single = window_scores(QUERIES[:1], KEYS, scale=1.0)
    torch.testing.assert_close(single, torch.tensor([[1.2121, 1.2727, 1.5152]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_against_a_naive_loop(aggregate: str) -> None:
    torch.manual_seed(0)
    events, heads, group, window, keys, dim = 2, 2, 3, 7, 5, 4
    q = torch.randn(events, heads * group, window, dim)
    k = torch.randn(events, heads, keys, dim)
    scores = window_scores(q, k, 0.5, aggregate)
    for e in range(events):
        for h in range(heads):
            total = torch.zeros(keys)
            for g in range(group):
                rows = torch.stack(
                    [
                        torch.softmax(q[e, h * group + g, i] @ k[e, h].T * 0.5, dim=-1)
                        for i in range(window)
                    ]
                )
                total += {
                    "sum": rows.sum(0),
                    "sum_squares": rows.square().sum(0),
                    "max": rows.amax(0),
                }[aggregate]
            torch.testing.assert_close(scores[e, h], total / group)


def test_invariants() -> None:
    """Rows sum to W; query order does not matter; permuted keys give permuted scores."""
    torch.manual_seed(1)
    q, k = torch.randn(4, 9, 8), torch.randn(2, 6, 8)
    scores = window_scores(q, k, 0.3)
    torch.testing.assert_close(scores.sum(-1), torch.full((2,), 9.0))
    shuffled = q[:, torch.randperm(9)]
    torch.testing.assert_close(window_scores(shuffled, k, 0.3), scores)
    order = torch.randperm(6)
    torch.testing.assert_close(window_scores(q, k[:, order], 0.3), scores[:, order])
