"""Scores by where queries point: the compiled kernel, Triton's, and the torch reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.kernels.checks import FUTURES
from kvserve.kernels.score.centre_scores import (
    Centres,
    centre_scores,
    centre_scores_by_head,
    centre_scores_cpu,
    centre_scores_torch,
)
from kvserve.kernels.score.centre_scores_triton import centre_scores_triton
from tests.thinning import thinned


def case(dim: int, dtype: torch.dtype, future: str, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [2, 3, 2, 77, D] that lie apart in memory, vectors and spread."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(dim)
    mean, magnitude = (
        torch.rand(3, 2 * group, size, generator=generator) for size in (dim, dim // 2)
    )
    frequencies = torch.rand(3, dim // 2, generator=generator)
    centres = Centres.of(mean, magnitude + 1, frequencies, 1.2)
    keys = torch.randn(3, 2, 2, 80, dim, generator=generator).to(dtype).transpose(0, 1)
    positions = torch.tensor([500, 90_001])
    return keys[..., 3:, :], centres.seen_from(positions, future), centres.spread


@pytest.mark.compiler
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("future", FUTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("dim", "group"), [(16, 1), (32, 3), (128, 8), (256, 2)])
def test_against_the_reference(
    dim: int, group: int, dtype: torch.dtype, future: str, normalise: bool
) -> None:
    keys, vectors, spread = case(dim, dtype, future, group)
    found = centre_scores_cpu(keys, vectors, spread, normalise)
    expected = centre_scores_torch(keys.double(), vectors.double(), spread.double(), normalise)
    scale = 1.0 if normalise else float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, atol=2e-5 * scale, rtol=0)


@pytest.mark.usefixtures("device")
@thinned(
    {"future": FUTURES, "dim,group": [(16, 1), (128, 3)], "dtype": [torch.float32, torch.float16]}
)
def test_triton(device: str, dim: int, group: int, dtype: torch.dtype, future: str) -> None:
    keys, vectors, spread = (x.to(device) for x in case(dim, dtype, future, group))
    found, expected = (
        find(keys, vectors, spread) for find in (centre_scores_triton, centre_scores_by_head)
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)


def test_other_head_sizes_are_for_the_reference() -> None:
    keys, vectors, spread = case(24, torch.float32, "mean", 2)
    assert torch.equal(
        centre_scores(keys, vectors, spread), centre_scores_torch(keys, vectors, spread)
    )


def test_keys_alike_have_no_deviation() -> None:
    keys, vectors, spread = case(16, torch.float32, "mean", 2)
    alike = keys[..., :1, :].expand(keys.shape)
    assert centre_scores(alike, vectors, spread).abs().max() < 0.1


def test_a_row_alone_has_the_scores_that_it_has_in_a_crowd() -> None:
    keys, vectors, spread = case(32, torch.bfloat16, "max", 4)
    both = centre_scores(keys, vectors, spread)
    assert torch.equal(both[1:], centre_scores(keys[1:], vectors[1:], spread))
