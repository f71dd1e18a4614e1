"""A row that is away: swapped to host memory, or kept for its conversation's next turn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray

NO_PLACE = -1
"""The place of a row that has nothing beside its blocks."""


class SavedTable(NamedTuple):
    """A row of a table: columns ``[first, end)`` ``[LG, R]``, and the ``blocks`` of all lanes, one
    after the other."""

    first: IntArray
    end: IntArray
    blocks: IntArray


class GroupRow(NamedTuple):
    """What a row holds in one cache group: its tables, and its ``fields`` from ``park_row``."""

    tables: tuple[SavedTable, ...]
    fields: dict[str, IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class SavedRow:
    """A row that is away: its ``counters`` by field, and what it holds, group by group; that of
    keys and values comes first."""

    counters: dict[str, IntArray]
    groups: tuple[GroupRow, ...]
    remainder: int = NO_PLACE
    """Where its remainder lies (``swap_memory``)."""

    @property
    def kv_lens(self) -> IntArray:
        """Entries of each lane: ``[LG, R]``."""
        return self.groups[0].fields["kv_lens"]

    @property
    def block_ids(self) -> IntArray:
        """Every block, once per reference."""
        return np.concatenate([table.blocks for group in self.groups for table in group.tables])

    def in_blocks(self, blocks: IntArray) -> SavedRow:
        """The same row in other blocks, given in the order of ``block_ids``."""
        groups = []
        for group in self.groups:
            tables = []
            for table in group.tables:
                own, blocks = np.split(blocks, [len(table.blocks)])
                tables.append(table._replace(blocks=own))
            groups.append(group._replace(tables=tuple(tables)))
        return replace(self, groups=tuple(groups))
