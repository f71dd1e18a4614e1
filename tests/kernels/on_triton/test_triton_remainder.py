"""Attention that begins with a remainder, by Triton against the reference; and what a fit is of."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.int4_log import quantize
from kvserve.kernels.scores.fitted_remainder import log_probs_of
from kvserve.kernels.scores.window_scores import window_scores_torch
from kvserve.kernels.scores.window_scores_triton import log_given_triton, window_scores_triton
from kvserve.kernels.shares import Given, Seen, Shares
from tests.kernels.on_triton.test_triton_paged_attention import TOLERANCE, Case
from tests.kernels.test_remainder import random_remainder

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("tables", "heads", "dtype", "lengths", "chunks"),
    [
        (1, 2, torch.float32, [70, 1, 40, 0], None),
        (2, 1, torch.float16, [33, 20], None),
        (1, 2, torch.float32, [70, 21], [3, 20]),
    ],
)
def test_attention(
    tables: int,
    heads: int,
    dtype: torch.dtype,
    lengths: list[int],
    chunks: list[int] | None,
    num_splits: int,
) -> None:
    """Rows with and without one, tokens that see nothing, contexts in parts, with shares."""
    case = Case(tables, heads, 3, 16, 16, dtype, lengths, chunks)
    left = random_remainder(len(case.tables), tables * heads, 16, 1)
    recent = torch.full((len(case.q),), 4)
    ours, theirs = (Shares(torch.empty(case.q.shape[:2]), recent) for _ in range(2))
    found = paged_attention_triton(*case.inputs, num_splits, shares=ours, remainder=left)
    expected = paged_attention_torch(*case.inputs, shares=theirs, remainder=left)
    within = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=within, rtol=within)
    torch.testing.assert_close(ours.out, theirs.out, atol=10 * within, rtol=10 * within)
    assert not torch.allclose(found, case.torch(), atol=within)


def test_what_scoring_finds_on_its_way() -> None:
    log = quantize(torch.randn(1, 2, 4, 21, 16), -torch.rand(1, 2, 4, 21))
    keys, seen = torch.randn(1, 2, 2, 21, 16), Seen(log.shares, 16, later=5)
    ours, theirs = (Given(torch.empty(1, 2, 4, 21), torch.empty(1, 2, 2, 16)) for _ in range(2))
    how = log, keys, 0.3, "sum_squares", "rms", seen
    scores, expected = window_scores_triton(*how, ours), window_scores_torch(*how, theirs)
    for found, wanted in zip((scores, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for sharp in (1.0, 300.0):  # the sum itself is then less than any float
        one = keys[..., :1, :] * -sharp
        given = log_given_triton(log, one, theirs.log_sums, 0.3)
        logits = log_probs_of(log, one, theirs.log_sums, 0.3)
        torch.testing.assert_close(given, logits.logsumexp(dim=(-3, -2)), rtol=1e-4, atol=1e-4)
