"""Smoothing of scores along tokens, so that a kept token brings its neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

POOLINGS = ("none", "avg", "max")


def pool_scores(scores: Tensor, kernel_size: int, pooling: str) -> Tensor:
    """Pool [..., n] with an odd kernel at stride 1; same shape, also where the kernel exceeds n.

    ``avg`` pads with zeros and always divides by the kernel, so that scores at the edges are
    damped; ``max`` pads with -inf.
    """
    if pooling == "none":
        return scores
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    flat = scores.reshape(-1, 1, scores.shape[-1])
    return pool(flat, kernel_size, stride=1, padding=kernel_size // 2).view(scores.shape)
