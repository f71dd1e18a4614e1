"""Inputs of a decoding step on a CPU: calls ``decode_inputs.cpp``."""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing
from kvserve.kernels.decode_inputs import (
    DecodeInputs,
    FillInputs,
    RowTables,
    check,
    decode_inputs_torch,
)

_POINTERS = (
    *("tables", "log_tables", "log_from", "log_span", "kv_lens", "num_computed", "count"),
    *("starts", "lengths"),
    *("positions", "slots", "last", "query_slots", "recent"),
)
_NUMBERS = (
    *("groups", "rows", "heads", "tokens", "chunks"),
    *("columns", "log_columns", "block", "log_block"),
)


class _Call(ctypes.Structure):
    """``DecodeInputs`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def decode_inputs(rows: RowTables, inputs: DecodeInputs, count: Tensor) -> None:
    """As ``kvserve.kernels.decode_inputs``, whose torch form is the reference."""
    check(rows, inputs)
    groups, num_rows, heads, columns = rows.block_tables.shape
    read = rows.block_tables, rows.log_tables, rows.log_from, rows.log_span
    chunks, tokens = inputs.chunks, len(inputs.positions)
    of_chunks = (None, None) if chunks is None else (chunks.starts, chunks.lengths)
    counted = rows.kv_lens, rows.num_computed, count, *of_chunks
    filled = inputs.positions, inputs.slots, inputs.last, inputs.query_slots, inputs.recent
    call = _Call(
        *(None if x is None else x.data_ptr() for x in (*read, *counted, *filled)),
        *(groups, num_rows, heads, tokens, tokens if chunks is None else len(chunks.lengths)),
        *(columns, rows.log_tables.shape[3], rows.block_tokens, rows.log_block_tokens),
    )
    calls.run(load_library("decode_inputs"), "decode_inputs", call)


def select_decode_inputs() -> FillInputs:
    """The compiled form, or torch's if there is no compiler."""
    return decode_inputs if why_missing("decode_inputs") is None else decode_inputs_torch
