"""Scores in, places of the best out, on a CPU: one call for every lane of an event."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled

TOP_PLACES = Compiled("top_places")
"""For float32 scores on a CPU."""


def write_top_places(scores: Tensor, out: Tensor, count: int) -> None:
    """The places of the ``count`` best of ``scores [..., n]``, ascending, into the first ``count``
    of ``out`` int64 [..., m], which is dense. Ties go to the older place."""
    if count == 0 or not scores.numel():
        return
    scores, length = scores.contiguous(), scores.shape[-1]
    rows = scores.numel() // length
    TOP_PLACES(scores, out, rows, length, count, out.shape[-1], torch.get_num_threads())
