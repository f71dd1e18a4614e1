"""The state of a row when its sequence ended, from which the next turn may resume."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray

NEW, TOKENS, POLICY, EVICTED = "new", "tokens", "policy", "evicted"
REFUSED, UNSUPPORTED, MEMORY = "refused", "unsupported", "memory"
MISSES = (NEW, TOKENS, POLICY, EVICTED, REFUSED, UNSUPPORTED, MEMORY)
"""Why a sequence resumes no continuation. ``NEW``: none begins like it. ``TOKENS``: the prompt of
one does, but the tokens generated after it differ. ``POLICY``: one fits, but has another policy.
``EVICTED``: one fitted, but is evicted. ``REFUSED``: the request says so. ``UNSUPPORTED``: the
policy or the request cannot resume. ``MEMORY``: there was no room to resume."""


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


@dataclass(slots=True, eq=False)
class Continuation:
    """What a sequence held of its ``token_ids`` when it ended; ``row`` is ``None`` once evicted.

    A sequence that resumes it must have the same ``shared_by``, and begin with at least ``floor``
    of its tokens: after those no event and no prompt came. Its last prompt ended at ``num_prompt``.
    ``events`` and ``num_shareable`` are the sequence's.
    """

    shared_by: Hashable
    token_ids: IntArray
    num_prompt: int
    floor: int
    row: SavedRow | None
    num_shareable: int
    events: tuple[int, ...]
    floor_key: bytes
    """The hash of the full columns before ``floor``, and below before ``num_prompt``."""
    prompt_key: bytes
    hosted: bool = False
    """Whether ``row`` is in host memory; its tables then name host blocks."""
    used: int = 0
    taken: int = 0
    """How many sequences have resumed it."""


class Resumption(NamedTuple):
    """A sequence resumes the first ``num_tokens`` of a continuation."""

    continuation: Continuation
    num_tokens: int
