"""What scoring is told of queries that have run, and what it finds on its way."""

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


class Given(NamedTuple):
    """What scoring finds on its way, for a fit: float32, dense.

    ``log_sums [..., Hq, W]`` are the logarithms of what each query's softmax divides by, ``keys
    [..., Hkv, n]`` what the queries of a group gave each key, added up.
    """

    log_sums: Tensor
    keys: Tensor
