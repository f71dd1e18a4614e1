"""The share of its attention that a query gave to the newest entries that it saw."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shares(NamedTuple):
    """Where attention writes the shares of T tokens.

    ``out`` float32 [T, Hq] takes their logarithms; ``recent`` int64 [T] is how many of the newest
    entries a share is of, at least the token's own.
    """

    out: Tensor
    recent: Tensor
