"""What logged queries had attended to."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Seen(NamedTuple):
    """What each of W queries had attended to when it ran, and what has come since.

    Query i stands at place p = ``first + step * i``, and saw the keys up to there. ``shares``
    float32 [..., Hq, W] are logarithms of what it gave, of all its attention, to those from the
    last multiple of ``span`` up to p on. ``later`` keys stand behind the n scored ones.
    """

    shares: Tensor
    span: int
    first: int = 0
    step: int = 1
    later: int = 0
