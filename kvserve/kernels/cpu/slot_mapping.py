"""Slots of entries on a CPU: calls ``slot_mapping.cpp``."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvserve.kernels.cpu import calls
from kvserve.kernels.cpu.build import load_library, why_missing

_POINTERS = ("tables", "rows", "entries", "counts", "out", "fault")
_NUMBERS = (
    *("num_events", "num_layers", "num_heads", "length"),
    *("groups", "num_rows", "tables_per_row", "columns", "block_tokens"),
)


class _Call(ctypes.Structure):
    """``SlotMapping`` of the C++ file, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("strides", ctypes.c_int64 * 4),
        ("counts_strides", ctypes.c_int64 * 3),
        *((name, ctypes.c_int64) for name in _NUMBERS),
    )


def takes(block_tables: Tensor) -> bool:
    """Whether the compiled kernel is there, and takes these tables."""
    if block_tables.device.type != "cpu" or block_tables.dtype is not torch.int32:
        return False
    return why_missing("slot_mapping") is None


def slots_of_entries(
    block_tables: Tensor,
    rows: Tensor,
    entries: Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
    counts: Tensor | None = None,
) -> Tensor:
    """As ``kernels.events.slots_of_entries``, whose function of torch is the reference.

    ``IndexError`` for a row or an entry that is not there.
    """
    tables, rows = block_tables.contiguous(), rows.to(torch.int64).contiguous()
    count, length = len(rows), entries.shape[-1]
    wide = entries.to(torch.int64).expand(count, *lanes, -1)
    exist = None if counts is None else counts.to(torch.int64).expand(count, *lanes)
    out = torch.empty(*lanes, count * length, dtype=torch.int64)
    fault = ctypes.c_int64()
    call = _Call(
        *(x.data_ptr() for x in (tables, rows, wide)),
        None if exist is None else exist.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(fault),
        (ctypes.c_int64 * 4)(*wide.stride()),
        (ctypes.c_int64 * 3)(*(() if exist is None else exist.stride())),
        *wide.shape,
        *tables.shape,
        block_tokens,
    )

    def refusal(code: int) -> IndexError:
        what = "row" if code == 1 else "entry"
        held = f"{tables.shape[1]} rows of {tables.shape[3]} blocks of {block_tokens}"
        return IndexError(f"slots_of_entries: {what} {fault.value} is not in {held}")

    calls.run(load_library("slot_mapping"), "slot_mapping", call, refusal)
    return out
