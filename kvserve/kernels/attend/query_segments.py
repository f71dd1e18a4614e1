"""Where the queries of a batch's rows begin and end, what they see, and what is told of them; and
what launchers of attention refuse before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense

if TYPE_CHECKING:
    from kvserve.kernels.store.coded_entries import Codes
    from kvserve.kernels.store.entries import AnyEntries
    from kvserve.kernels.store.remainder import Remainder


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


def check_attention(
    q: Tensor,
    keys: AnyEntries,
    values: AnyEntries,
    tables: Tensor,
    chunks: QuerySegments,
    codes: Codes | None = None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
    problem: str | None = None,
) -> None:
    """Raises ``ValueError`` for shapes that do not fit. Arguments are those of
    ``paged_attention_torch``; ``problem`` is what a kernel does not do, if anything."""
    problem = problem or _problem_of_entries(q, keys, values) or _problem(q, keys, tables, chunks)
    if problem is not None:
        raise ValueError(
            f"paged attention: {problem} (query {list(q.shape)}, blocks {list(keys.shape)}, "
            f"tables {list(tables.shape)})"
        )
    check_dense("sinks", sinks, q.shape[1:2], torch.float32)
    if shares is not None:
        check_dense("out of shares", shares.out, q.shape[:2], torch.float32)
        check_dense("recent of shares", shares.recent, q.shape[:1], torch.int64)
    if remainder is not None:
        lanes = len(tables), tables.shape[1] * keys.shape[2]
        for name, x in (("keys", remainder.keys), ("values", remainder.values)):
            check_dense(f"{name} of the remainder", x, (*lanes, q.shape[2]), torch.float32)
        check_dense("bias of the remainder", remainder.bias, lanes, torch.float32)
    if codes is not None:
        assert isinstance(keys, Tensor), "codes refer to vectors as they were computed"
        codes.check(tables, keys)


def _problem_of_entries(q: Tensor, keys: AnyEntries, values: AnyEntries) -> str | None:
    if isinstance(keys, Tensor) is not isinstance(values, Tensor):
        return "keys and values are not both levels"
    if keys.shape != values.shape or keys.shape[3] != q.shape[2]:
        return f"keys, values {list(values.shape)} and queries are of different shapes"
    if isinstance(keys, Tensor) and isinstance(values, Tensor):
        if not q.dtype is keys.dtype is values.dtype:
            return f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}: they have to be the same"
        if keys.stride(-1) != 1:
            return "entries are not dense"
        if keys.stride() != values.stride():
            return "keys and values are not laid out alike"
    return "queries are not dense" if q.stride(-1) != 1 else None


def _problem(q: Tensor, keys: AnyEntries, tables: Tensor, chunks: QuerySegments) -> str | None:
    tokens, per_row, starts = len(q), tables.shape[1], chunks.starts
    if q.shape[1] % (per_row * keys.shape[2]):
        return "query heads do not divide over the KV heads of the blocks and tables"
    if tables.dtype is not torch.int32 or not tables.is_contiguous():
        return "tables are not dense int32"
    given = [x for x in (chunks.last, chunks.first, chunks.always) if x is not None]
    count = tokens if starts is None else len(starts) - 1
    if len(chunks.rows) != count or any(x.shape != (per_row, tokens) for x in given):
        return f"rows of {len(chunks.rows)} chunks do not fit the query and the tables"
    if not all(x.is_contiguous() and x.dtype is given[0].dtype for x in given):
        return "what tokens see is not dense, or of two types"
    return None if chunks.rows.is_contiguous() else "rows are not dense"
