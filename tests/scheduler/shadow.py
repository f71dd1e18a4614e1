"""A runner without tensors: follows the scheduler's messages and remembers what is where.

Every slot holds (sequence, logical position), so a wrong table, a freed block in use, a shared
block written or a misplaced move shows as a row whose entries are not what they should be.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.output import CompactionTask, SchedulerOutput, TableUpdate
from kvserve.scheduler.scheduler import Scheduler
from kvserve.scheduler.trigger import NOT_LOGGING, Trigger

Entry = tuple[int, int]


class ShadowRunner:
    """Rows, tables and memory as the device would have them (granularity MODEL)."""

    def __init__(self, scheduler: Scheduler, triggers: dict[int, Trigger]) -> None:
        self.scheduler = scheduler
        self.triggers = triggers
        self.size = scheduler.layout.block_size
        self.log_size = scheduler.blocks.log_block_tokens
        self.tables: IntArray = np.zeros_like(scheduler.blocks.kv.blocks)
        self.log_tables: IntArray = np.zeros_like(scheduler.blocks.log.blocks)
        self.memory: dict[tuple[int, int], Entry] = {}
        self.log_memory: dict[tuple[int, int], Entry] = {}
        rows = scheduler.rows.max_rows
        self.owner = np.full(rows, -1)
        self.entries: list[list[int]] = [[] for _ in range(rows)]
        self.computed = np.zeros(rows, int)
        self.log_from = np.zeros(rows, int)
        self.events: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def run(self, output: SchedulerOutput) -> IntArray:
        """Carry out one message; returns a token per sampled sequence."""
        for task in output.compactions:
            self._compact(task)
        for a, b in output.row_swaps:
            for array in (self.owner, self.computed, self.log_from):
                array[a], array[b] = array[b], array[a]
            self.entries[a], self.entries[b] = self.entries[b], self.entries[a]
            self.tables[:, [a, b]] = self.tables[:, [b, a]]
            self.log_tables[:, [a, b]] = self.log_tables[:, [b, a]]
        for seq, log_from in zip(output.admitted, output.admitted_log_from, strict=True):
            self.owner[seq.row], self.entries[seq.row] = seq.seq_id, []
            self.computed[seq.row], self.log_from[seq.row] = 0, log_from
            self.events[seq.seq_id] = []
        _scatter(self.tables, output.table_update)
        _scatter(self.log_tables, output.log_update)
        for row in range(output.num_decoding):
            self._store(row, 1)
        for row, length in zip(output.prefill.rows, output.prefill.lengths, strict=True):
            self._store(row, length)
        self.check_rows()
        return np.array([self.token(seq.seq_id, seq.row) for seq in output.sampled], np.int32)

    def token(self, seq_id: int, row: int) -> int:
        """A token that depends on the sequence's own past alone."""
        return int((seq_id * 31 + self.computed[row] * 7) % 97 + 2)

    def check_rows(self) -> None:
        for row in range(self.scheduler.rows.num_rows):
            held = [self.memory[self._slot(row, i)] for i in range(len(self.entries[row]))]
            assert held == [(self.owner[row], p) for p in self.entries[row]]
            assert (self.scheduler.blocks.kv_lens[:, row] == len(held)).all()

    def _store(self, row: int, count: int) -> None:
        for _ in range(count):
            position = int(self.computed[row])
            slot = self._slot(row, len(self.entries[row]))
            assert self.scheduler.pool.ref[slot[0]] == 1, "a shared or free block is written"
            self.memory[slot] = (self.owner[row], position)
            self.entries[row].append(position)
            if position >= self.log_from[row]:
                block = self.log_tables[0, row, 0, position // self.log_size]
                assert self.scheduler.pool.ref[block] == 1
                self.log_memory[block, position % self.log_size] = (self.owner[row], position)
            self.computed[row] += 1

    def _compact(self, task: CompactionTask) -> None:
        queries, plan = self.triggers[task.policy_id].num_queries, task.plan
        for e, row in enumerate(task.rows):
            start, windows, length = plan.region_start[e], plan.windows[e], plan.window_len[e]
            old, size, first_query = self.entries[row], self.size, plan.query_start[e]
            last_query = first_query + (windows - 1) * length + queries
            if self.log_from[row] == NOT_LOGGING:
                first_query = last_query  # this trigger's queries are recomputed, or not needed
            for position in range(first_query, last_query):
                block = self.log_tables[0, row, 0, position // self.log_size]
                assert self.log_memory[block, position % self.log_size] == (
                    self.owner[row],
                    position,
                ), "a query that the event needs is not in the log"
            kept = []
            for w in range(windows):
                first = start + w * length
                kept += old[first : first + length][-plan.keep[e] :]
            new = old[:start] + kept + old[start + windows * length :]
            assert len(old) == task.old_lens[e] and len(new) == task.new_lens[e]
            first_column = task.copy_start[e] // size
            for i in range(task.copy_start[e], len(new)):
                block = task.dst_blocks[0, e, 0, i // size - first_column]
                self.memory[block, i % size] = (self.owner[row], new[i])
            self.entries[row] = new
            self.log_from[row] = task.log_from[e]
            self.events[self.owner[row]].append((int(self.computed[row]), int(windows)))

    def _slot(self, row: int, index: int) -> tuple[int, int]:
        return int(self.tables[0, row, 0, index // self.size]), index % self.size


def _scatter(tables: IntArray, update: TableUpdate) -> None:
    tables.reshape(-1)[update.indices] = update.blocks
