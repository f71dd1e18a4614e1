"""What attention is told of a batch's coded entries."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The n rows of a batch whose codes are rebuilt before each layer attends.

    ``totals`` entries are coded in each layer, which the host knows; ``coded [LG, n, R]`` in each
    lane; ``kv_tables``, ``index_tables``, ``vector_tables`` ``[LG, n, R, .]``.
    """

    totals: tuple[int, ...]
    coded: Tensor
    kv_tables: Tensor
    index_tables: Tensor
    vector_tables: Tensor
