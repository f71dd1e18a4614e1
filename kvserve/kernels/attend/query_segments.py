"""Where the queries of a batch's rows begin and end, what they see, and what is told of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class QuerySegments(NamedTuple):
    """P chunks of consecutive tokens, T in all; tensors of integers on the device.

    ``rows [P]`` of the block tables; token t sees entries ``first[r, t]`` (``None``: 0) to
    ``last[r, t]`` (``[R, T]``, below ``max_held``) of table r of its row. ``starts [P + 1]`` are
    the first tokens of chunks of at most ``max_chunk``; ``None``: P = T chunks of one. Entries
    before ``always[r, t]`` are seen as well, as far as they are not behind the last.
    """

    rows: Tensor
    last: Tensor
    max_held: int
    starts: Tensor | None = None
    max_chunk: int = 1
    first: Tensor | None = None
    always: Tensor | None = None


class Shares(NamedTuple):
    """Where attention writes the shares of T tokens.

    ``out`` float32 [T, Hq] takes their logarithms; ``recent`` int64 [T] is how many of the newest
    entries a share is of, at least the token's own.
    """

    out: Tensor
    recent: Tensor
