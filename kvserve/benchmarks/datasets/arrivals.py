"""Send times of an open-loop client: at a rate, in bursts or along a ramp, whatever the answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ramp:
    """Requests per second at the first and at the last request; ``linear`` or ``exponential``."""

    strategy: str
    start: float
    end: float


def send_times(
    count: int, rate: float, burstiness: float, seed: int, ramp: Ramp | None = None
) -> list[float]:
    """Seconds from the start, one per request.

    Gaps are gamma-distributed with shape ``burstiness`` (1: Poisson arrivals; below: bursts; above:
    more even). They are then scaled so that their sum is what the rate gives.
    """
    if ramp is None and rate == float("inf"):
        return [0.0] * count
    part = np.arange(count) / max(1, count - 1)
    if ramp is None:
        rates = np.full(count, rate)
    elif ramp.strategy == "linear":
        rates = ramp.start + (ramp.end - ramp.start) * part
    else:
        rates = ramp.start * (ramp.end / ramp.start) ** part
    means = 1.0 / rates
    gaps = np.random.default_rng(seed).gamma(burstiness, means)
    times = np.cumsum(gaps)
    return (times * (means.sum() / times[-1])).tolist()
