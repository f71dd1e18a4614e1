"""The compiled kernel over entries in few bits and the newest ones as they were computed."""

from __future__ import annotations

import pytest
import torch

from kvserve.entry_format import FORMATS
from tests.kernels.newest_case import NewestCase
from tests.thinning import thinned

pytestmark = pytest.mark.compiler


@thinned(
    {
        "name": ["k4v4", "k4v2"],
        "dtype": [torch.float32, torch.bfloat16],
        "dim": [16, 48, 128],
        "tables": [1, 2],
        "cap": [0.0, 1.5],
    }
)
def test_one_softmax(name: str, dtype: torch.dtype, dim: int, tables: int, cap: float) -> None:
    """Over both, a remainder and sinks; shares count the newest of both."""
    case = NewestCase(FORMATS[name], dim, dtype, tables)
    within = 1e-5 if dtype is torch.float32 else 1e-2
    for lengths in ([1, 1, 1], [1, 1, 7], [110], [40, 3, 7]):
        found, expected = case.of_cpu(lengths, cap), case.of_torch(lengths, cap)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=within, rtol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 48, 128])
def test_a_token_alone_and_in_a_chunk_is_the_same_to_the_last_bit(
    dim: int, dtype: torch.dtype
) -> None:
    """Or its own entries, which are rounded, could go to another level."""
    case = NewestCase(FORMATS["k4v4"], dim, dtype)
    together, shares = case.of_cpu([110])
    q, recent = case.q, case.inputs([110])[-1]
    for token in range(110):
        case.seen[0], case.q = 150 - 109 + token, q[token:]
        alone, _ = case.of_cpu([1])
        assert torch.equal(alone[0], together[token])
    assert shares.isfinite().all() and len(recent.unique()) > 30
