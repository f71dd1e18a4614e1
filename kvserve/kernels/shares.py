"""What share of its attention a query gave to the newest entries that it saw."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shares(NamedTuple):
    """Where attention leaves the shares of T tokens.

    ``out`` float32 [T, Hq] takes their logarithms; ``recent`` int64 [T] is how many entries are
    meant, at least the token's own.
    """

    out: Tensor
    recent: Tensor
