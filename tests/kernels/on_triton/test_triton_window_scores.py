"""Two-pass window scores by Triton against the torch reference."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.checks import AGGREGATES
from kvserve.kernels.scores.window_scores import window_scores_torch
from kvserve.kernels.scores.window_scores_triton import window_scores_triton
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")


@thinned(
    {
        "aggregate": AGGREGATES,
        "group": [1, 3],
        "dim,window,keys,dtype": [
            (64, 70, 130, torch.float32),
            (128, 5, 90, torch.float16),
            (16, 65, 1, torch.float32),
            (128, 70, 130, torch.bfloat16),
        ],
    }
)
def test_scores(
    dim: int, window: int, keys: int, dtype: torch.dtype, group: int, aggregate: str
) -> None:
    if dtype is torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("the interpreter rounds bfloat16 otherwise")
    # Lanes in the order in which they are gathered, [L, heads, E, S, D], seen event by event.
    q = torch.randn(2, 2 * group, 1, window, dim).permute(2, 0, 1, 3, 4).to(dtype)
    k = torch.randn(2, 2, 1, keys, dim).permute(2, 0, 1, 3, 4).to(dtype)
    found = window_scores_triton(q, k, 0.2, aggregate)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.2, aggregate))
    if aggregate == "sum":
        torch.testing.assert_close(found.sum(-1), torch.full(found.shape[:-1], float(window)))


def test_several_events_of_strided_lanes() -> None:
    q = torch.randn(3, 4, 2 * 20, 32).unflatten(2, (2, 20)).permute(2, 0, 1, 3, 4)
    k = torch.randn(3, 2, 2 * 24, 32).unflatten(2, (2, 24)).permute(2, 0, 1, 3, 4)[..., :17, :]
    found = window_scores_triton(q, k, 0.3)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.3))
    flat = window_scores_triton(q.flatten(0, 1), k.flatten(0, 1), 0.3)
    torch.testing.assert_close(flat, found.flatten(0, 1))


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float8_e4m3fn])
def test_queries_of_another_type_than_the_keys(query_dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 20, 32).to(query_dtype), torch.randn(2, 40, 32).half()
    found = window_scores_triton(q, k, 0.3)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.3))


def test_every_e4m3_number_is_widened_exactly() -> None:
    """Also by the interpreter, which is wrong about arithmetic in it and casts to it."""
    codes = torch.arange(256, dtype=torch.uint8) % 0x7F  # the two codes of nan are left out
    codes[128:] += 128
    q, k = codes.view(torch.float8_e4m3fn).view(1, 16, 16), torch.eye(16)[None] / 64
    found = window_scores_triton(q, k, 1.0, "max")
    torch.testing.assert_close(found, window_scores_torch(q.float(), k, 1.0, "max"))


def test_nothing_to_score() -> None:
    assert window_scores_triton(torch.randn(2, 4, 16), torch.randn(2, 0, 16), 1.0).shape == (2, 0)
