"""Integer arrays of numpy, as all of the scheduler uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[Any]


def ragged_arange(counts: IntArray) -> IntArray:
    """``[0..counts[0]), [0..counts[1]), ...`` in one array."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    places: IntArray = np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts)
    return places
