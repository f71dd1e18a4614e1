"""Attention over paged blocks on a CPU: what ``paged_attention.cpp`` takes, and its reference."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.kernels.checks import check_codes
from kvserve.kernels.coded_entries import Codes
from kvserve.kernels.cpu.build import load_library

DTYPES = (torch.float32, torch.bfloat16)
HEAD_DIM_MULTIPLE, MAX_HEAD_DIM = 8, 256

_POINTERS = ("query", "out", "keys", "values", "tables", "rows", "starts", "last", "fault")
_CODES = ("coded", "slots", "vectors", "slot_tables", "vector_tables", "turns")
_NUMBERS = (
    *("slots_per_block", "slot_columns", "vector_columns", "num_turns"),
    *("query_stride", "block_stride"),
    *("num_tokens", "num_chunks", "num_blocks", "num_rows", "columns"),
    *("block_size", "num_heads", "num_kv_heads", "tables_per_row", "head_dim"),
    "num_threads",
)
_REFUSALS = {
    1: "chunk {} is of table row {}, which is not there",
    2: "chunk {} ends at token {}, which is not there",
    3: "chunk {} sees entry {}, which its tables do not hold",
    4: "chunk {} reads block {}, which is not one of the pool",
    5: "chunk {} refers to vector {}, which its codebook does not hold",
    6: "chunk {} turns a key by {} positions, more than a sequence has",
}


class _Call(ctypes.Structure):
    """``PagedAttention`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*_POINTERS, *_CODES)),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Chunks:
    """S runs of consecutive tokens, each of one table row; int64, on the CPU.

    ``rows [S]``; ``starts [S + 1]`` first tokens, and T; ``last [LG, R, T]`` the last entry that
    each token sees of each of its tables, -1 for none.
    """

    rows: Tensor
    starts: Tensor
    last: Tensor


def refusal(head_dim: int) -> str | None:
    """Why the kernel does not take heads of this size, if it does not."""
    if head_dim % HEAD_DIM_MULTIPLE == 0 and 0 < head_dim <= MAX_HEAD_DIM:
        return None
    return f"head_dim {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: Chunks,
    group: int,
    scale: float,
    codes: Codes | None = None,
) -> Tensor:
    """Each token against its row's entries up to its ``last``, softmax at ``scale``.

    query: [T, Hq, D]; keys, values: [num_blocks, B, Hkv/R, D]; tables: int32 [LG, num_rows, R, M],
    of which layer group ``group`` is read; ``codes`` are that group's. Returns [T, Hq, D]; zeros
    where a token sees nothing. ``ValueError`` for shapes it is not built for, ``IndexError`` for a
    row, an entry, a block or a vector that is not there; block 0 is no sequence's. Reference:
    ``kvserve.kernels.paged_attention.paged_attention_torch``.
    """
    _check(query, keys, values, tables, chunks, codes)
    out = torch.empty(query.shape, dtype=query.dtype)
    fault = (ctypes.c_int64 * 2)()
    num_rows, per_row, columns = tables.shape[1:]
    call = _Call(
        query.data_ptr(),
        out.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        tables.data_ptr() + group * tables.stride(0) * tables.itemsize,
        chunks.rows.data_ptr(),
        chunks.starts.data_ptr(),
        chunks.last.data_ptr() + group * chunks.last.stride(0) * chunks.last.itemsize,
        ctypes.addressof(fault),
        *_code_fields(codes),
        query.stride(0),
        keys.stride(0),
        len(query),
        len(chunks.rows),
        len(keys),
        num_rows,
        columns,
        keys.shape[1],
        query.shape[1],
        keys.shape[2] * per_row,
        per_row,
        query.shape[2],
        torch.get_num_threads(),
        scale,
        query.dtype is torch.bfloat16,
    )
    refused = load_library("paged_attention").kvserve_paged_attention(ctypes.byref(call))
    if refused:
        raise IndexError(f"paged attention: {_REFUSALS[refused].format(*fault)}")
    return out


def _code_fields(codes: Codes | None) -> tuple[int | None, ...]:
    if codes is None:
        return *[None] * len(_CODES), 0, 0, 0, 0
    slots, vectors, coded, slot_tables, vector_tables, turns = codes
    pointers = (x.data_ptr() for x in (coded, slots, vectors, slot_tables, vector_tables, turns))
    return *pointers, slots.shape[1], slot_tables.shape[2], vector_tables.shape[2], len(turns)


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: Chunks,
    codes: Codes | None,
) -> None:
    """Raise ``ValueError`` unless everything is as the kernel takes it for granted."""
    problem = _problem(query, keys, values, tables, chunks)
    if problem is not None:
        raise ValueError(
            f"paged attention: {problem} (query {list(query.shape)}, blocks {list(keys.shape)}, "
            f"tables {list(tables.shape)})"
        )
    if codes is not None:
        check_codes(codes, tables[0], keys)


def _problem(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, chunks: Chunks
) -> str | None:
    tokens, heads, dim = query.shape
    per_table = keys.shape[2]
    if (why := refusal(dim)) is not None:
        return why
    if query.dtype not in DTYPES or not query.dtype is keys.dtype is values.dtype:
        return f"dtypes {query.dtype}, {keys.dtype}, {values.dtype}: one of {DTYPES} is needed"
    if keys.shape != values.shape or keys.shape[3] != dim or heads % (per_table * tables.shape[2]):
        return "query heads do not divide over the KV heads of the blocks and tables"
    strides = keys.stride()
    if query.stride()[1:] != (dim, 1) or strides[1:] != (per_table * dim, dim, 1):
        return "a token of the query, or a layer of a block, is not dense"
    if strides != values.stride():
        return "keys and values are not laid out alike"
    if tables.dtype is not torch.int32 or not tables.is_contiguous():
        return "tables are not dense int32"
    parts = chunks.rows, chunks.starts, chunks.last
    if not all(part.dtype is torch.int64 and part.is_contiguous() for part in parts):
        return "chunks are not dense int64"
    if (
        chunks.last.shape != (tables.shape[0], tables.shape[2], tokens)
        or len(chunks.starts) != len(chunks.rows) + 1
    ):
        return "chunks do not fit the query and the tables"
    return None
