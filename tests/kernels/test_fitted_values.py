"""Values solved anew, beside dense least squares in double precision."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvserve.kernels.scores.fitted_values import RIDGE, fitted_values


@pytest.mark.parametrize(("queries", "length", "keep"), [(48, 20, 6), (5, 20, 12), (16, 9, 9)])
def test_they_are_those_of_dense_least_squares(queries: int, length: int, keep: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    probs = torch.rand(2, 3, queries, length, generator=generator).softmax(-1)
    values = torch.randn(2, 3, length, 4, generator=generator)
    kept = torch.rand(2, 3, length, generator=generator).argsort(-1)[..., :keep].sort(-1).values
    found = fitted_values(probs, values, kept)
    for lane in np.ndindex(2, 3):
        every, old = probs[lane].double().numpy(), values[lane].double().numpy()
        staying = every[:, kept[lane]]
        near = np.sqrt(RIDGE * np.diag(staying.T @ staying).mean()) * np.eye(keep)
        matrix = np.concatenate([staying, near])
        wanted = np.concatenate([every @ old, near @ old[kept[lane]]])
        expected = np.linalg.lstsq(matrix, wanted, rcond=None)[0]
        np.testing.assert_allclose(found[lane].numpy(), expected, rtol=1e-3, atol=1e-4)


def test_outputs_come_nearer() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(64, 30, generator=generator).softmax(-1)
    values = torch.randn(30, 8, generator=generator)
    kept = torch.arange(0, 30, 3)
    new = fitted_values(probs, values, kept)
    before, after = (
        (probs @ values - probs[:, kept] @ each).norm() for each in (values[kept], new)
    )
    assert after < 0.8 * before


def test_where_no_query_looks_values_stay() -> None:
    values = torch.randn(6, 4)
    kept = torch.tensor([1, 4])
    assert torch.equal(fitted_values(torch.zeros(3, 6), values, kept), values[kept])
