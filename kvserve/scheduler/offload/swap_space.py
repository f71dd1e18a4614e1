"""Swap space in host memory: a compressed sequence that was preempted comes back unchanged.

Recomputing it would first rebuild the larger cache that its events had cut down, and replay them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.continuations import Continuations
from kvserve.scheduler.blocks.hosted_rows import HostedRows
from kvserve.scheduler.blocks.remainder_places import NOTHING
from kvserve.scheduler.messages.continuation import GroupRow
from kvserve.scheduler.messages.output import SwapTask
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable


@dataclass(frozen=True, slots=True, eq=False)
class ParkedRow:
    """A row in host memory: its counters by field, and what it held in each cache group.

    ``host_blocks`` are in the order of its table entries, group by group.
    """

    counters: dict[str, IntArray]
    held: tuple[GroupRow, ...]
    num_unmodified_tokens: int
    remainder: int
    host_blocks: IntArray


class SwapSpace:
    """Blocks of host memory for parked rows, which come before the continuations there."""

    def __init__(
        self,
        hosted: HostedRows,
        rows: RowTable,
        blocks: BlockManager,
        continuations: Continuations | None,
    ) -> None:
        self.pool = hosted.pool
        self._hosted = hosted
        self._rows = rows
        self._blocks = blocks
        self._continuations = continuations
        self._parked: dict[int, ParkedRow] = {}
        self._outs: list[SwapTask] = []
        self._ins: list[SwapTask] = []
        self._discarded: list[int] = []

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._parked

    def park(self, seq: Sequence) -> bool:
        """Copy a row's blocks to host memory, if there is room; the caller then frees the row."""
        rows, blocks, row = self._rows, self._blocks, seq.row
        leaves = rows.has_remainder(row)
        if leaves and not blocks.remainders.have_free(preempted=True):
            return False
        blocks.give_back_unused(np.array([row]), rows.num_computed[row : row + 1])
        device = blocks.named(row)
        if not self._hosted.have_free(len(device)):
            return False
        host = self.pool.allocate(len(device))
        self._parked[seq.seq_id] = ParkedRow(
            rows.park_row(row),
            blocks.save(row),
            int(min(rows.num_unmodified_tokens[row], rows.num_computed[row])),
            blocks.remainders.save(row) if leaves else NOTHING,
            host,
        )
        # Freeing the row moves it behind all others; the runner will find it there.
        self._outs.append(SwapTask(rows.num_rows - 1, int(host[0]), device, host))
        return True

    def identity_tokens(self, seq: Sequence) -> int:
        """Leading tokens of a parked sequence whose entries no event has changed."""
        return self._parked[seq.seq_id].num_unmodified_tokens

    def blocks_wanted(self, seq: Sequence, reserve: int) -> int:
        """Blocks that a parked row needs to come back and grow by ``reserve`` entries."""
        return self._blocks.wanted_to_return(self._parked[seq.seq_id].held, reserve)

    def restore(self, seq: Sequence, columns: IntArray) -> None:
        """Give a parked sequence a row; its first ``columns [n, .]`` are cached prefixes."""
        rows, blocks = self._rows, self._blocks
        parked = self._parked.pop(seq.seq_id)
        row = rows.restore(seq, parked.counters)
        device, fresh = blocks.come_back(row, parked.held, columns)
        blocks.remainders.load(parked.remainder, row)
        blocks.remainders.release(parked.remainder)
        place = int(parked.host_blocks[0])
        self._ins.append(SwapTask(row, place, device, parked.host_blocks[fresh]))
        self._hosted.release_after_step(parked.host_blocks)

    def discard(self, seq: Sequence) -> None:
        """Forget a parked sequence."""
        parked = self._parked.pop(seq.seq_id)
        self._discarded.append(int(parked.host_blocks[0]))
        self._blocks.remainders.release(parked.remainder)
        self.pool.release(parked.host_blocks)

    def discard_all_of(self, gone: SwapSpace) -> None:
        """Let the device forget what it keeps of the rows in another space, which is given up."""
        self._discarded += gone._discarded
        self._discarded += [int(parked.host_blocks[0]) for parked in gone._parked.values()]

    def take_tasks(self) -> tuple[tuple[int, ...], tuple[SwapTask, ...], tuple[SwapTask, ...]]:
        """Places discarded, rows swapped out and rows swapped in since the last call."""
        outs, ins = self._hosted.take_tasks()
        tasks = tuple(self._discarded), (*self._outs, *outs), (*self._ins, *ins)
        for taken in (self._discarded, self._outs, self._ins):
            taken.clear()
        return tasks

    def check_integrity(self) -> None:
        """Every host block is free or holds a part of one parked row or continuation; every place
        of a remainder has one owner."""
        held = [parked.host_blocks for parked in self._parked.values()]
        hosted = self._hosted.held()
        assert len(hosted) == self._hosted.num_held
        self.pool.check_integrity(np.concatenate([hosted, *held]))
        away = [parked.remainder for parked in self._parked.values()]
        if self._continuations is not None:
            saved = self._continuations.all
            away += [known.row.remainder for known in saved if known.row is not None]
        self._blocks.remainders.check_integrity(away)
