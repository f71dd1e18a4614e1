"""The Triton kernels over entries in few bits and the newest ones as they were computed."""

from __future__ import annotations

import pytest
import torch

from kvserve.entry_format import FORMATS
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.shares import Shares
from tests.kernels.newest_case import SCALE, NewestCase

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize(
    ("name", "tables", "dim", "cap"),
    [
        ("k4v2", 2, 32, 0.0),
        pytest.param("k4v4", 1, 64, 0.0, marks=pytest.mark.slow),
        pytest.param("k4v4", 2, 16, 1.5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [9, 3, 7]], ids=["decode", "chunks"])
def test_one_softmax(name: str, tables: int, dim: int, cap: float, lengths: list[int]) -> None:
    """Over both, a remainder and sinks; shares count the newest of both."""
    case = NewestCase(FORMATS[name], dim, torch.float32, tables)
    expected, expected_shares = case.of_torch(lengths, cap)
    starts, last, first, at, recent = case.inputs(lengths)
    segments, newest = case.parts(starts, last, first, at, recent)
    if max(lengths) == 1:
        segments = segments._replace(starts=None)
        newest = newest._replace(chunks=newest.chunks._replace(starts=None))
    for splits in (1, 3):
        shares = Shares(torch.empty(len(at), 12), recent - (at - first + 1))
        beside = splits, None, shares, case.remainder, case.sinks, cap, newest
        q, (keys, values) = case.q[: len(at)], case.blocks.layer(1)
        found = paged_attention_triton(q, keys, values, case.tables, segments, SCALE, *beside)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shares.out, expected_shares, atol=1e-5, rtol=1e-5)
