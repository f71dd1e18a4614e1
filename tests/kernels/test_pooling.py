"""Pooling of scores: padding at the edges, order against the group's reduction, naive loops."""

from __future__ import annotations

import math

import pytest
import torch

from kvserve.kernels.score.pooling import POOLINGS, pool_scores


def naive(row: list[float], kernel: int, pooling: str) -> list[float]:
    half, out = kernel // 2, []
    for at in range(len(row)):
        around = [row[j] for j in range(at - half, at + half + 1) if 0 <= j < len(row)]
        out.append(
            {"none": row[at], "avg": math.fsum(around) / kernel, "max": max(around)}[pooling]
        )
    return out


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kernel", [1, 3, 5, 11])
def test_against_a_naive_loop(pooling: str, kernel: int) -> None:
    torch.manual_seed(kernel)
    for length in (1, 2, 7, 20):
        scores = torch.randn(2, 3, 2, length)
        got = pool_scores(scores, kernel, pooling)
        assert got.shape == scores.shape
        for row, pooled in zip(scores.view(12, length), got.view(12, length), strict=True):
            expected = torch.tensor(naive(row.tolist(), kernel, pooling))
            torch.testing.assert_close(pooled, expected)
