"""What attention needs to know of a batch's coded entries, and the tables of codes."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The n rows of a batch whose codes are rebuilt before each layer attends.

    ``totals`` entries are coded in each layer, which the host knows; ``tables`` are those rows'.
    """

    totals: tuple[int, ...]
    tables: CodeTables
