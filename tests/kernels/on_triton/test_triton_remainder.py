"""What a fit of a remainder is of, by Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.int4_log import quantize
from kvserve.kernels.scores.fitted_remainder import log_probs_of
from kvserve.kernels.scores.window_scores import window_scores_torch
from kvserve.kernels.scores.window_scores_triton import log_given_triton, window_scores_triton
from kvserve.kernels.shares import Given, Seen

pytestmark = pytest.mark.usefixtures("device")


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
