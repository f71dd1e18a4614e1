"""Scores by where queries point, by Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.scores.centre_scores import (
    FUTURES,
    centre_scores_by_head,
    centre_scores_triton,
)
from tests.kernels.test_centre_scores import case
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")


@thinned(
    {"future": FUTURES, "dim,group": [(16, 1), (128, 3)], "dtype": [torch.float32, torch.float16]}
)
def test_against_the_reference(
    device: str, dim: int, group: int, dtype: torch.dtype, future: str
) -> None:
    keys, vectors, spread = (x.to(device) for x in case(dim, dtype, future, group))
    found = centre_scores_triton(keys, vectors, spread)
    torch.testing.assert_close(
        found, centre_scores_by_head(keys, vectors, spread), atol=1e-3, rtol=1e-5
    )
