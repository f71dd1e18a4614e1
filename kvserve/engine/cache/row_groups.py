"""The rows' tables of cache groups beside keys, values and logged queries, on the device.

A new kind of entry is a ``GroupSpec`` for the scheduler (``scheduler/blocks/cache_group.py``) and a
``RowGroup`` here, in a file of its own, and one line: ``KINDS.append(...)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.cache_group import GroupSpec
from kvserve.scheduler.row_schema import RowArrays

if TYPE_CHECKING:
    from kvserve.scheduler.messages.event import Events
    from kvserve.scheduler.messages.output import RowMove

Shapes = tuple[tuple[int, ...], ...]
"""Of a group's tables ``[LG, rows, R, M]``, in its order."""


class RowGroup(RowArrays):
    """Tables of one group, and the fields that a subclass declares."""

    spec_type: ClassVar[type[GroupSpec]]
    writes: ClassVar[bool] = False
    """Whether each layer writes something of every token (``write``)."""

    def __init__(self, spec: GroupSpec, shapes: Shapes, device: str) -> None:
        self.spec = spec
        self.tables = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
        lanes = shapes[0][:3]
        self.make_by_group(lambda: torch.zeros(lanes, dtype=torch.int64, device=device))

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        """View the blocks of ``cache`` as this group's."""

    def begin(self, rows: Tensor) -> None:
        """Begin rows that hold nothing in this group."""
        self.begin_rows(rows, None, partial(rows.new_full, ()))

    def move(self, to: Tensor, source: Tensor) -> None:
        """Put the rows ``source`` in the place of the rows ``to``, all at once."""
        for table in self.tables:
            table[:, to] = table[:, source]
        self.move_rows(to, source)

    def swap(self, moves: Iterable[RowMove], *, back: bool) -> None:
        """Copy what rows have beside tables to where they wait, or ``back``."""

    def after_compaction(self, task: Events, rows: Tensor) -> None:
        """Set what ``task`` leaves of ``rows``."""

    def of_batch(self) -> dict[str, Any]:
        """Fields of ``ForwardBatch`` that every forward gets."""
        return {}

    def over(
        self, batch: ForwardBatch, rows: Tensor, columns: IntArray, rounded_at: Tensor
    ) -> ForwardBatch:
        """``batch`` with what its tokens, of ``rows [T]``, see of this group; ``columns [S]`` of
        blocks of keys and values are in use by tokens; those before ``rounded_at``, by row, are not
        read as they were computed."""
        return batch

    def nothing_of(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch`` whose tokens see nothing of this group."""
        return batch

    def update(self, batch: ForwardBatch, rows: Tensor, real: Tensor, rounded_at: Tensor) -> None:
        """Fill the buffers that ``nothing_of`` gave ``batch``, for its ``real [T]`` tokens."""

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where the tokens at ``positions [T]`` of ``rows [T]`` write: int64 [LG, R, T]."""
        (table,) = self.tables
        lanes = positions.expand(table.shape[0], table.shape[2], -1)
        return slot_mapping(table, rows, lanes, self.spec.block_tokens)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one layer's new keys and values, both [T, Hkv, D], at ``slots [LG, R, T]``."""
        raise AssertionError("only groups that say so write")


KINDS: list[type[RowGroup]] = []
"""Every kind of further group that an engine may have."""


def make_row_group(spec: GroupSpec, shapes: Shapes, device: str) -> RowGroup:
    """The device's side of a group."""
    if spec.rows:
        resolve_name(spec.rows)
    kind = next(kind for kind in KINDS if kind.spec_type is type(spec))
    return kind(spec, shapes, device)
