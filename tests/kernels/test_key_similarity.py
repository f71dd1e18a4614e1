"""R-KV's redundancy and KeyDiff's anchor against naive loops, worked numbers and invariants."""

from __future__ import annotations

import math

import pytest
import torch

from kvserve.kernels.score.key_similarity import anchor_similarity, redundancy


def cosine(a: list[float], b: list[float]) -> float:
    size = max(math.hypot(*a), 1e-8) * max(math.hypot(*b), 1e-8)
    return sum(x * y for x, y in zip(a, b, strict=True)) / size


def naive_redundancy(keys: list[list[float]], threshold: float) -> list[float]:
    """The full matrix, one row at a time."""
    length = len(keys)
    matrix = [
        [0.0 if i == j else cosine(keys[i], keys[j]) for j in range(length)] for i in range(length)
    ]
    for row in matrix:
        similar = [j for j in range(length) if row[j] > threshold]
        row[similar[-1] if similar else 0] = 0.0
    means = [sum(row[j] for row in matrix) / length for j in range(length)]
    powers = [math.exp(mean) for mean in means]
    return [power / sum(powers) for power in powers]


def naive_anchor(keys: list[list[float]]) -> list[float]:
    units = [[x / max(math.hypot(*key), 1e-8) for x in key] for key in keys]
    anchor = [sum(column) / len(keys) for column in zip(*units, strict=True)]
    return [cosine(key, anchor) for key in keys]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 70])
def test_redundancy_against_the_full_matrix(length: int) -> None:
    """Rows are taken 32 at a time; some keys are equal."""
    torch.manual_seed(length)
    keys = torch.randn(2, 2, 3, length, 4)
    keys[..., length // 2, :] = keys[..., 0, :]
    got = redundancy(keys, 0.5)
    for one, row in zip(keys.view(12, length, 4), got.view(12, length), strict=True):
        expected = torch.tensor(naive_redundancy(one.tolist(), 0.5))
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.sum(-1), torch.ones(2, 2, 3))


def test_redundancy_on_the_worked_example() -> None:
    """Each row forgives its newest near-copy: the last but one for the newest, the newest else."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 0.05], [0.7, 0.7]])
    expected = torch.tensor([0.2389, 0.2470, 0.1652, 0.2097, 0.1392])
    torch.testing.assert_close(redundancy(keys, 0.5), expected, atol=5e-5, rtol=0)


def test_anchor_against_a_naive_loop_and_the_worked_example() -> None:
    keys = torch.randn(2, 3, 9, 5)
    for one, row in zip(keys.view(6, 9, 5), anchor_similarity(keys).view(6, 9), strict=True):
        torch.testing.assert_close(row, torch.tensor(naive_anchor(one.tolist())))
    example = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [1.0, 0.2]])
    expected = torch.tensor([0.9156, 0.9544, 0.4022, 0.9767])
    torch.testing.assert_close(anchor_similarity(example), expected, atol=5e-5, rtol=0)


def test_anchor_ignores_the_length_of_keys_and_survives_empty_ones() -> None:
    keys = torch.randn(7, 4)
    scaled = keys * torch.rand(7, 1).add(0.1)
    torch.testing.assert_close(anchor_similarity(scaled), anchor_similarity(keys))
    assert anchor_similarity(torch.zeros(3, 4)).isfinite().all()
