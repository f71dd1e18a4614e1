"""What launchers refuse before anything runs, so that no kernel reads or writes outside the cache.

Shapes are checked. Only the device knows what addresses hold, and kernels skip those outside of the
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.coded_entries import CODE_WORDS, Codes
from kvserve.kernels.quantized_entries import QuantizedVectors
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares

HEAD_DIMS = (16, 32, 64, 128, 256)
# In the order that kernels number them: over a window's queries, then over a group's heads.
AGGREGATES = ("sum", "sum_squares", "max")
GROUP_AGGREGATES = ("mean", "max", "rms")


def check_head_dim(*tensors: Tensor) -> None:
    """Raises ``ValueError`` unless all end in one supported, contiguous dimension."""
    dim = tensors[0].shape[-1]
    for x in tensors:
        if x.shape[-1] != dim or dim not in HEAD_DIMS or x.stride(-1) != 1:
            raise ValueError(
                f"the last dimension has to be head_dim, one of {HEAD_DIMS}, contiguous and the "
                f"same for all; got shape {list(x.shape)}, strides {list(x.stride())}"
            )


def runs_triton(x: Tensor) -> bool:
    """Whether entries ``x [..., D]`` are for the kernels: on CUDA, of a head dimension they know.

    Others are for the torch references, on any device.
    """
    return x.is_cuda and x.shape[-1] in HEAD_DIMS


def check_codes(codes: Codes, tables: Tensor, keys: Tensor) -> None:
    """Raises ``ValueError`` for codes that do not fit tables [num_rows, R, M] and the cache."""
    slots, vectors, coded, slot_tables, vector_tables, turns = codes
    num_blocks, block, heads, dim = keys.shape
    wanted = {
        "slots": (slots, (num_blocks, slots.shape[1], CODE_WORDS), torch.int16),
        "vectors": (vectors, (num_blocks, 2 * block, dim), keys.dtype),
        "coded": (coded, tables.shape[:2], torch.int64),
        "slot_tables": (slot_tables, (*tables.shape[:2], slot_tables.shape[-1]), torch.int32),
        "vector_tables": (vector_tables, (*tables.shape[:2], vector_tables.shape[-1]), torch.int32),
        "turns": (turns, (len(turns), dim), torch.float32),
    }
    for name, (x, shape, dtype) in wanted.items():
        if x.shape != shape or x.dtype is not dtype or not x.is_contiguous():
            raise ValueError(
                f"{name} of codes have to be {list(shape)} of {dtype}, contiguous; got "
                f"{list(x.shape)} of {x.dtype}"
            )
    if heads != 1:
        raise ValueError(f"codes are of one KV head a block, and the cache is {list(keys.shape)}")


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raises ``ValueError`` unless the sinks are those of the heads of q [T, Hq, D]."""
    if sinks is None:
        return
    if sinks.shape != q.shape[1:2] or sinks.dtype is not torch.float32 or not sinks.is_contiguous():
        raise ValueError(
            f"sinks have to be [{q.shape[1]}] of float32, contiguous; got {list(sinks.shape)} of "
            f"{sinks.dtype}"
        )


def check_shares(shares: Shares | None, q: Tensor) -> None:
    """Raises ``ValueError`` unless the shares of q [T, Hq, D] can be written."""
    if shares is None:
        return
    for name, x, shape, dtype in (
        ("out", shares.out, q.shape[:2], torch.float32),
        ("recent", shares.recent, q.shape[:1], torch.int64),
    ):
        if x.shape != shape or x.dtype is not dtype or not x.is_contiguous():
            raise ValueError(
                f"{name} of shares has to be {list(shape)} of {dtype}, contiguous; got "
                f"{list(x.shape)} of {x.dtype}"
            )


def check_remainder(
    remainder: Remainder | None, tables: Tensor, q: Tensor, keys: Tensor | QuantizedVectors
) -> None:
    """Raises ``ValueError`` unless each row of ``tables [rows, R, M]`` has a remainder for q."""
    if remainder is None:
        return
    lanes = len(tables), tables.shape[1] * keys.shape[2]
    for name, x, shape in (
        ("keys", remainder.keys, (*lanes, q.shape[2])),
        ("values", remainder.values, (*lanes, q.shape[2])),
        ("bias", remainder.bias, lanes),
    ):
        if x.shape != shape or x.dtype is not torch.float32 or not x.is_contiguous():
            raise ValueError(
                f"{name} of the remainder have to be {list(shape)} of float32, contiguous; got "
                f"{list(x.shape)} of {x.dtype}"
            )


def _check_entries(
    q: Tensor, keys: Tensor | QuantizedVectors, values: Tensor | QuantizedVectors
) -> None:
    if not isinstance(keys, Tensor) and not isinstance(values, Tensor):
        check_head_dim(q)
        if not keys.shape == values.shape == (*keys.shape[:3], q.shape[-1]):
            raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} differ")
        return
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        raise ValueError("keys and values are not both levels")
    check_head_dim(q, keys, values)
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} differ")
    if len({x.dtype for x in (q, keys, values)}) > 1:
        raise ValueError(f"q is {q.dtype}, keys are {keys.dtype} and values are {values.dtype}")


def check_attention(
    q: Tensor,
    keys: Tensor | QuantizedVectors,
    values: Tensor | QuantizedVectors,
    tables: Tensor,
    chunks: QuerySegments,
    codes: Codes | None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
) -> None:
    """Raises ``ValueError`` for shapes that do not fit. Arguments are those of
    ``paged_attention_triton``."""
    _check_entries(q, keys, values)
    check_shares(shares, q)
    check_remainder(remainder, tables, q, keys)
    rows, last, starts = chunks.rows, chunks.last, chunks.starts
    tokens, per_row = len(q), tables.shape[1]
    if q.shape[1] % (per_row * keys.shape[2]):
        groups = f"{per_row} * {keys.shape[2]} KV heads"
        raise ValueError(f"q {list(q.shape)} has no whole group for each of {groups}")
    if last.shape != (per_row, tokens):
        raise ValueError(f"last has to be [{per_row}, {tokens}], got {list(last.shape)}")
    if len(rows) != (tokens if starts is None else len(starts) - 1):
        wanted = "tokens" if starts is None else f"chunks of starts {list(starts.shape)}"
        raise ValueError(
            f"rows {list(rows.shape)} do not go with the {wanted} of q {list(q.shape)}"
        )
    first = last if chunks.first is None else chunks.first
    if first.shape != last.shape or first.dtype is not last.dtype or not first.is_contiguous():
        raise ValueError(f"first has to be as last {list(last.shape)}, contiguous")
    if not (tables.is_contiguous() and last.is_contiguous() and rows.is_contiguous()):
        raise ValueError("tables, rows and last have to be contiguous")
    if codes is not None:
        assert isinstance(keys, Tensor), "codes refer to vectors as they were computed"
        check_codes(codes, tables, keys)
