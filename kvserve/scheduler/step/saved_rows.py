"""Rows that leave when they are preempted, and come back.

A compressed sequence that is preempted goes to host memory and comes back unchanged. Recomputing it
would first rebuild the larger cache that its events had cut down, and replay them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.cache_group import ResumeAt
from kvserve.scheduler.messages.saved_row import SavedRow
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.messages.continuation import Resumption


class SavedRows:
    """Rows that are away: preempted ones are parked in host memory, where they come before those of
    the ``store`` of continuations."""

    def __init__(self, rows: RowTable, blocks: BlockManager, totals: EngineStats) -> None:
        self._totals = totals
        self.misses: Counter[str] = Counter()
        """Why sequences resumed nothing."""
        self.store = blocks.continuations
        self._rows, self._blocks, self._memory = rows, blocks, self.store.host
        self.host_pool = self._memory.pool
        self._parked: dict[int, SavedRow] = {}

    # ---- preempted rows ----------------------------------------------------------------------

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._parked

    def park(self, seq: Sequence) -> bool:
        """Copy a row's blocks to host memory, if there is room; the caller then frees the row."""
        rows, memory, row = self._rows, self._memory, seq.row
        if rows.has_remainder(row) and not memory.have_place(preempted=True):
            return False
        saved = self._save(row)
        device = saved.block_ids
        if not self.store.have_host_blocks(len(device)):
            return False
        saved = self._with_remainder(saved, row)
        self._parked[seq.seq_id] = saved.in_blocks(memory.move_out(device, row))
        return True

    def identity_tokens(self, seq: Sequence) -> int:
        """Leading tokens of a parked sequence whose entries no event has changed."""
        counters = self._parked[seq.seq_id].counters
        return int(min(counters["num_unmodified_tokens"], counters["num_computed"]))

    def cached_blocks(self, columns: IntArray) -> IntArray:
        """What a row that comes back takes of cached ``columns [n, .]``: keys and values. All else
        comes from host memory."""
        entries = self._blocks.groups[0]
        return columns[:, : entries.tables[0].num_lanes * entries.cached_with_prefixes]

    def blocks_wanted(self, seq: Sequence, reserve: int) -> int:
        """Blocks that a parked row needs to come back and grow by ``reserve`` entries."""
        parked = self._parked[seq.seq_id]
        return self._blocks_to_resume(parked, True, _resume_at(parked, reserve))

    def restore(self, seq: Sequence, columns: IntArray) -> None:
        """Give a parked sequence a row, which shares cached ``columns [n, LG * R]``."""
        parked = self._parked.pop(seq.seq_id)
        row = self._rows.restore(seq, parked.counters)
        at = _resume_at(parked, 0)
        self._resume(row, parked, True, at, columns)
        self._blocks.queries.log_from(np.array([row]), np.array([at.log_from]), at.log_stride)
        self._memory.bring_back(row, parked.block_ids)
        self._memory.release_place(parked.remainder)

    def discard(self, seq: Sequence) -> None:
        """Forget a parked sequence."""
        parked = self._parked.pop(seq.seq_id)
        self._memory.discard(parked.block_ids)
        self._memory.release_place(parked.remainder)

    def take_over(self, gone: SavedRows) -> None:
        """Go on counting where ``gone`` was, whose rows are given up: the device forgets what it
        keeps of them."""
        self.misses = gone.misses
        rows = [int(parked.block_ids[0]) for parked in gone._parked.values()]
        self._memory.discard_all_of(gone._memory, rows)

    # ---- continuations: there are none here, see ``ContinuedRows`` -------------------------------

    def save_row(self, seq: Sequence) -> None:
        """Save the row of a sequence that ends now."""

    def find(self, seq: Sequence) -> Resumption | None:
        """What a waiting sequence may resume."""

    def count_miss(self, seq: Sequence) -> None:
        """Count, by its cause, that a sequence resumes nothing."""

    # ---- both --------------------------------------------------------------------------------

    def _save(self, row: int) -> SavedRow:
        """What a row counts and holds in blocks."""
        rows, blocks = self._rows, self._blocks
        blocks.give_back_unused(np.array([row]), rows.num_computed[[row]])
        groups = tuple(group.save(row) for group in blocks.groups)
        return SavedRow(rows.park_row(row), groups)

    def _with_remainder(self, saved: SavedRow, row: int) -> SavedRow:
        """And its remainder, if it has one. There is a place for it."""
        if not self._rows.has_remainder(row):
            return saved
        return replace(saved, remainder=self._memory.save_remainder(row))

    def _blocks_to_resume(self, saved: SavedRow, hosted: bool, at: ResumeAt) -> int:
        """Blocks for ``_resume``, and for the row's growth up to its target."""
        each = zip(self._blocks.groups, saved.groups, strict=True)
        return sum(group.wanted_to_resume(row, hosted, at) for group, row in each)

    def _resume(
        self, row: int, saved: SavedRow, hosted: bool, at: ResumeAt, columns: IntArray | None = None
    ) -> None:
        """Begin a row as a saved one. Queries logged before it begins to log are left out.

        It shares all full blocks. It writes more entries to the others, so it gets copies of those:
        at most one for each lane, and one for each lane's log. A ``hosted`` row is copied from host
        memory to private blocks; it shares cached ``columns [n, LG * R]`` of keys and values.
        """
        blocks, memory = self._blocks, self._memory
        move = memory.move_in if hosted else memory.copy
        blocks.start_row(row)
        memory.load_remainder(saved.remainder, row)
        for group, held in zip(blocks.groups, saved.groups, strict=True):
            tokens = group.resumed_tokens(held, at)
            if tokens is None:
                continue
            for table, there in zip(group.tables, held.tables, strict=True):
                own_from = there.first if hosted else tokens // table.block_tokens
                shared = None
                if columns is not None and columns.size and table is blocks.kv:
                    shared, own_from = columns, own_from + len(columns)
                move(*table.resume(row, there, tokens, own_from, shared))
            group.resume_fields(row, held, at)

    def check_integrity(self) -> None:
        """Every host block and every place is free, or belongs to one row that is away."""
        away = self._parked.values()
        saved = [known.row for known in self.store.all if known.row is not None]
        blocks = [self.store.named_blocks(hosted=True), *(row.block_ids for row in away)]
        self._memory.check_integrity(blocks, [row.remainder for row in (*away, *saved)])


def _resume_at(parked: SavedRow, reserve: int) -> ResumeAt:
    """Where a preempted row goes on that grows by ``reserve`` tokens."""
    computed, log = int(parked.counters["num_computed"]), parked.groups[1].fields
    return ResumeAt(0, computed, computed + reserve, int(log["_from"]), int(log["_stride"]))
