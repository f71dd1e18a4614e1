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


class Given(NamedTuple):
    """What scoring finds on its way, for a fit: float32, dense.

    ``log_sums [..., Hq, W]`` are the logarithms of what each query's softmax divides by, ``keys
    [..., Hkv, n]`` what the queries of a group gave each key, added up.
    """

    log_sums: Tensor
    keys: Tensor
