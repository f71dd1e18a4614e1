"""The tables of rows that are held as codes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CodeTables(NamedTuple):
    """All rows' tables on the device, int32 ``[LG, num_rows, R, .]``: blocks of keys and values, of
    logged queries, of code slots and of codebook vectors; and int64 ``[LG, num_rows, R]``, how many
    entries are coded and how many vectors they have."""

    kv: Tensor
    log: Tensor
    code_slots: Tensor
    vectors: Tensor
    coded: Tensor
    num_vectors: Tensor
