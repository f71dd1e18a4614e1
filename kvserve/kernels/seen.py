"""What logged queries had attended to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Seen(NamedTuple):
    """What each of W queries had attended to when it ran, and what has come since.

    Query i is at place p = ``first + step * i``, and saw the keys up to p. ``shares`` float32
    [..., Hq, W] are logarithms of the share of its attention that it gave to the newest of these:
    those from the last multiple of ``span`` up to p. ``later`` keys follow the n scored ones.
    """

    shares: Tensor
    span: int
    first: int = 0
    step: int = 1
    later: int = 0
