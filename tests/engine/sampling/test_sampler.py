"""Sampling: distributions, filters, seeds that do not care about the batch, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvserve.engine.sampling.sampler import RowSampling, SamplingRows
from kvserve.kernels.sample import sample_tokens as kernel
from kvserve.kernels.sample.sample_tokens import gumbel_noise, keep_allowed
from kvserve.scheduler.messages.output import NewRequest

BASE = RowSampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1, min_len=0, logprobs=None)


def rows_with(*settings: RowSampling, stop: tuple[int, ...] = ()) -> SamplingRows:
    rows = SamplingRows(len(settings), 64, "cpu")
    rows.set_rows(
        [NewRequest(i, i, 4, np.zeros(4, np.int32), stop, one) for i, one in enumerate(settings)]
    )
    return rows


def draw(setting: RowSampling, logits: torch.Tensor, count: int) -> torch.Tensor:
    """``count`` tokens of one row, one per position."""
    rows = rows_with(setting)
    repeated = logits.expand(count, -1)
    at = np.zeros(count, np.int32)
    return rows.sample(repeated, at, torch.arange(count)).token_ids


def test_noise_is_uniform_in_every_direction() -> None:
    """Draws over positions, seeds and tokens follow the softmax (chi-square, 4 sigma)."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    expected = logits.softmax(-1) * 20000
    by_position = draw(BASE, logits, 20000)
    seeds = torch.arange(20000)
    by_seed = (logits + gumbel_noise(seeds, torch.zeros_like(seeds), 5)).argmax(-1)
    for tokens in (by_position, by_seed):
        counts = torch.bincount(tokens, minlength=5)
        chi2 = ((counts - expected) ** 2 / expected).sum()
        assert chi2 < 4 + 4 * (2 * 4) ** 0.5, counts


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_noise_is_finite(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite noise would bring back tokens that are banned."""
    monkeypatch.setattr(kernel, "_mix", lambda x: torch.full_like(x, bits))
    assert gumbel_noise(torch.tensor([1]), torch.tensor([1]), 3).isfinite().all()


def test_neighbouring_tokens_and_positions_are_independent() -> None:
    noise = gumbel_noise(torch.tensor([7]), torch.tensor([3]), 50000)[0]
    shifted = gumbel_noise(torch.tensor([7]), torch.tensor([4]), 50000)[0]
    pairs = [(noise[:-1], noise[1:]), (noise, shifted)]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.02


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_k": 1}, {4}),
        ({"top_p": 0.6}, {4}),
        ({"top_p": 0.7}, {3, 4}),
        ({"min_p": 0.3}, {3, 4}),
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.2}, {3, 4}),
        ({"top_p": 1e-6}, {4}),
        ({"temperature": 0.0}, {4}),
    ],
)
def test_filters(changes: dict[str, Any], allowed: set[int]) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])  # softmax .01 .03 .09 .23 .64
    tokens = draw(replace(BASE, **changes), logits, 500)
    assert set(tokens.tolist()) == allowed


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}])
def test_filters_that_leave_one_token_are_greedy_where_several_are_equal(
    changes: dict[str, Any],
) -> None:
    """transformers 5.23.0 leaves both tokens under top_k=1, and the last one under top_p=0."""
    logits = torch.tensor([0.0, 2.0, 2.0, 1.0])
    assert set(draw(replace(BASE, **changes), logits, 100).tolist()) == {int(logits.argmax())}


def test_of_equal_tokens_the_first_are_kept() -> None:
    for changes in ({"top_k": 2}, {"top_p": 0.5}):
        tokens = draw(replace(BASE, **changes), torch.zeros(4), 200)
        assert set(tokens.tolist()) == {0, 1}, changes


def test_a_row_without_limits_loses_nothing_to_rounding() -> None:
    """Beside a row that filters, as alone: probabilities may add to 1 before the last."""
    one, none = torch.ones(50), torch.zeros(50)
    assert keep_allowed(torch.randn(50, 300) * 8, one, none, none).isfinite().all()


def test_rows_sample_the_same_in_any_batch() -> None:
    settings = [replace(BASE, seed=s, temperature=0.7 + s / 10) for s in range(6)]
    rows = rows_with(*settings)
    logits, positions = torch.randn(6, 40), torch.arange(10, 16)
    together = rows.sample(logits, np.arange(6), positions).token_ids
    order = np.array([4, 0, 5, 2, 1, 3])
    shuffled = rows.sample(logits[order], order, positions[order]).token_ids
    assert torch.equal(shuffled, together[order])
    for i in range(6):
        alone = rows.sample(logits[i : i + 1], np.array([i]), positions[i : i + 1]).token_ids
        assert alone[0] == together[i]


def test_moving_rows_moves_their_settings() -> None:
    rows = rows_with(replace(BASE, temperature=0.0), replace(BASE, seed=9))
    logits, positions = torch.randn(2, 40), torch.tensor([5, 6])
    before = rows.sample(logits, np.arange(2), positions).token_ids
    rows.move_rows(np.array([0, 1]), np.array([1, 0]))
    after = rows.sample(logits.flip(0), np.arange(2), positions.flip(0)).token_ids
    assert torch.equal(after.flip(0), before)


def test_stop_tokens_wait_for_min_tokens() -> None:
    rows = rows_with(replace(BASE, temperature=0.0, min_len=8), stop=(2, 0))
    logits = torch.tensor([[3.0, 1.0, 4.0, 2.0]])
    at = np.zeros(1, np.int32)
    assert rows.sample(logits, at, torch.tensor([7])).token_ids.tolist() == [3]
    assert rows.sample(logits, at, torch.tensor([8])).token_ids.tolist() == [2]
