"""Fused Token2Chunk by Triton gives the places of the policies' torch code, equals included."""

from __future__ import annotations

import pytest
import torch

from kvserve.engine.policies.selection import token_to_chunk_torch
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")


@thinned(
    {
        "count,keep,budget,max_chunk": [
            (1, 1, 0, 8),
            (9, 9, 4, 4),
            (16, 11, 9, 3),
            (17, 6, 3, 8),  # a budget of less than a chunk
            (40, 12, 11, 4),  # a single token leaves no gap
            (100, 30, 24, 5),
            (100, 44, 8, 6),  # many gaps compete for two chunks
            (480, 144, 16, 8),
        ],
        "levels": [2, 9, None],
    }
)
def test_places(count: int, keep: int, budget: int, max_chunk: int, levels: int | None) -> None:
    """``levels``: so many different scores only."""
    scores = torch.rand(2, 3, count) ** 4
    if levels is not None:
        scores = (scores * levels).floor() / levels - 0.25
    expected = token_to_chunk_torch(scores, keep, budget, max_chunk)
    assert torch.equal(token_to_chunk_triton(scores, keep, budget, max_chunk), expected)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1])
@pytest.mark.parametrize("chunk_budget", [0, 6])
def test_nan_is_above_all_numbers(bits: int, chunk_budget: int) -> None:
    """Whatever its bits: a GPU's own NaN has all of them set. None is written elsewhere, so there
    are as many places as were asked for, and they are in range."""
    scores = torch.rand(3, 20)
    scores[0, 0] = scores[0, 7] = scores[2, 19] = torch.nan
    scores[1] = torch.nan
    nan = torch.isnan(scores)
    scores.view(torch.int32)[nan] = bits
    found = token_to_chunk_triton(scores, 12, chunk_budget, 5)
    assert ((found >= 0) & (found < 20)).all() and (found.diff() > 0).all()
    if chunk_budget == 0:
        # On a GPU torch's own sort takes a NaN with a sign for the least of all.
        assert torch.equal(found.cpu(), token_to_chunk_torch(scores.cpu(), 12, 0, 5))


def test_places_of_strided_scores() -> None:
    scores = torch.rand(3, 4, 50).transpose(0, 1)[..., 5:40]
    found = token_to_chunk_triton(scores, 12, 6, 5)
    assert torch.equal(found, token_to_chunk_torch(scores, 12, 6, 5))


def test_no_lanes() -> None:
    assert token_to_chunk_triton(torch.rand(0, 4, 50), 12, 6, 5).shape == (0, 4, 12)
