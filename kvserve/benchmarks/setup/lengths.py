"""Random lengths of requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def lognormal_lengths(
    rng: np.random.Generator, count: int, mean: float, sigma: float, cap: int
) -> NDArray[np.int32]:
    """``count`` lengths of a log-normal distribution, cut to ``[1, cap]``; sigma 0 is constant."""
    drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(drawn.round(), 1, cap).astype(np.int32)
