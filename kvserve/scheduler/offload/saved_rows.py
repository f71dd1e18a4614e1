"""Rows that are saved and resumed: by later turns of a conversation, or after a preemption.

A compressed sequence that is preempted goes to host memory and comes back unchanged. Recomputing it
would first rebuild the larger cache that its events had cut down, and replay them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.cache_group import ResumeAt
from kvserve.scheduler.messages.continuation import NO_PLACE, SavedRow
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable


def save_row(rows: RowTable, blocks: BlockManager, row: int) -> SavedRow:
    """What a row counts, and holds in blocks."""
    blocks.give_back_unused(np.array([row]), rows.num_computed[[row]])
    return SavedRow(rows.park_row(row), tuple(group.save(row) for group in blocks.groups))


def blocks_to_resume(blocks: BlockManager, saved: SavedRow, hosted: bool, at: ResumeAt) -> int:
    """Blocks for ``resume_row``, and for the row's growth up to its target."""
    each = zip(blocks.groups, saved.groups, strict=True)
    return sum(group.wanted_to_resume(row, hosted, at) for group, row in each)


def resume_row(
    blocks: BlockManager,
    row: int,
    saved: SavedRow,
    hosted: bool,
    at: ResumeAt,
    columns: IntArray | None = None,
) -> None:
    """Begin a row as a saved one. Queries logged before it begins to log are left out.

    It shares all full blocks. It writes more entries to the others, so it gets copies of those: at
    most one for each lane, and one for each lane's log. A ``hosted`` row is copied from host memory
    to private blocks; it shares cached ``columns [n, LG * R]`` of keys and values.
    """
    memory = blocks.continuations.host
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


class SwapSpace:
    """Preempted rows in host memory, which come before the continuations there."""

    def __init__(self, rows: RowTable, blocks: BlockManager) -> None:
        self._rows, self._blocks, self._store = rows, blocks, blocks.continuations
        self._memory = self._store.host
        self.pool = self._memory.pool
        self._parked: dict[int, SavedRow] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._parked

    def park(self, seq: Sequence) -> bool:
        """Copy a row's blocks to host memory, if there is room; the caller then frees the row."""
        rows, memory, row = self._rows, self._memory, seq.row
        leaves = rows.has_remainder(row)
        if leaves and not memory.have_place(preempted=True):
            return False
        saved = save_row(rows, self._blocks, row)
        device = saved.named
        if not self._store.have_host_blocks(len(device)):
            return False
        saved = saved.renamed(memory.move_out(device, row))
        remainder = memory.save_remainder(row) if leaves else NO_PLACE
        self._parked[seq.seq_id] = replace(saved, remainder=remainder)
        return True

    def identity_tokens(self, seq: Sequence) -> int:
        """Leading tokens of a parked sequence whose entries no event has changed."""
        counters = self._parked[seq.seq_id].counters
        return int(min(counters["num_unmodified_tokens"], counters["num_computed"]))

    def shared(self, columns: IntArray) -> IntArray:
        """What a row that comes back takes of cached ``columns [n, .]``: keys and values. All else
        comes from host memory."""
        entries = self._blocks.groups[0]
        return columns[:, : entries.tables[0].num_lanes * entries.cached_with_prefixes]

    def blocks_wanted(self, seq: Sequence, reserve: int) -> int:
        """Blocks that a parked row needs to come back and grow by ``reserve`` entries."""
        parked = self._parked[seq.seq_id]
        return blocks_to_resume(self._blocks, parked, True, _resume_at(parked, reserve))

    def restore(self, seq: Sequence, columns: IntArray) -> None:
        """Give a parked sequence a row, which shares cached ``columns [n, LG * R]``."""
        parked = self._parked.pop(seq.seq_id)
        row = self._rows.restore(seq, parked.counters)
        at = _resume_at(parked, 0)
        resume_row(self._blocks, row, parked, True, at, columns)
        self._blocks.queries.log_from(np.array([row]), np.array([at.log_from]))
        self._memory.bring_back(row, parked.named)
        self._memory.release_place(parked.remainder)

    def discard(self, seq: Sequence) -> None:
        """Forget a parked sequence."""
        parked = self._parked.pop(seq.seq_id)
        self._memory.discard(parked.named)
        self._memory.release_place(parked.remainder)

    def discard_all_of(self, gone: SwapSpace) -> None:
        """Let the device forget what it keeps of the rows in another space, which is given up."""
        rows = [int(parked.named[0]) for parked in gone._parked.values()]
        self._memory.discard_all_of(gone._memory, rows)

    def check_integrity(self) -> None:
        """Every host block and every place is free, or belongs to one row that is away."""
        away = self._parked.values()
        saved = [known.row for known in self._store.all if known.row is not None]
        blocks = [self._store.held(hosted=True), *(row.named for row in away)]
        self._memory.check_integrity(blocks, [row.remainder for row in (*away, *saved)])


def _resume_at(parked: SavedRow, reserve: int) -> ResumeAt:
    """Where a preempted row goes on that grows by ``reserve`` tokens."""
    computed, log_from = parked.counters["num_computed"], parked.groups[1].fields["_from"]
    return ResumeAt(0, int(computed), int(computed) + reserve, int(log_from))
