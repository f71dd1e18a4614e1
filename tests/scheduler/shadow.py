"""A runner without tensors: follows the scheduler's messages and remembers what is where.

Every slot holds the *content* of an entry: a hash of its token and of all that its row held when it
was computed. Two entries are equal only if they saw the same past, evictions included. So a wrong
table, a freed block in use, a shared block written, a misplaced move, or a cached column that was
computed after an eviction shows as a row that does not hold what it should.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.output import CompactionTask, SchedulerOutput, TableUpdate
from kvserve.scheduler.scheduler import Scheduler
from kvserve.scheduler.trigger import NOT_LOGGING, Trigger

Slot = tuple[int, int]


class ShadowRunner:
    """Rows, tables and memory as the device would have them (granularity MODEL)."""

    def __init__(self, scheduler: Scheduler, triggers: dict[int, Trigger]) -> None:
        self.scheduler = scheduler
        self.triggers = triggers
        self.size = scheduler.layout.block_size
        self.log_size = scheduler.blocks.log_block_tokens
        self.tables: IntArray = np.zeros_like(scheduler.blocks.kv.blocks)
        self.log_tables: IntArray = np.zeros_like(scheduler.blocks.log.blocks)
        self.memory: dict[Slot, int] = {}
        self.log_memory: dict[Slot, tuple[int, int]] = {}
        rows = scheduler.rows.max_rows
        self.owner = np.full(rows, -1)
        self.held: list[list[int]] = [[] for _ in range(rows)]
        self.computed = np.zeros(rows, int)
        self.log_from = np.zeros(rows, int)
        self.last_token = np.zeros(rows, int)
        self.parked: dict[int, list[int]] = {}
        self.host: dict[int, tuple[dict[int, int], dict[int, tuple[int, int]]]] = {}
        self.events: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.before: dict[int, list[tuple[int, int]]] = {}
        self._published: dict[bytes, list[int]] = {}

    def run(self, output: SchedulerOutput) -> IntArray:
        """Carry out one message; returns a token per sampled sequence."""
        for task in output.compactions:
            self._compact(task)
        for a, b in output.row_swaps:
            for array in (self.owner, self.computed, self.log_from, self.last_token):
                array[a], array[b] = array[b], array[a]
            self.held[a], self.held[b] = self.held[b], self.held[a]
            self.tables[:, [a, b]] = self.tables[:, [b, a]]
            self.log_tables[:, [a, b]] = self.log_tables[:, [b, a]]
        self._swap(output)
        new = output.admitted
        back = {task.row: self.parked.pop(task.place) for task in output.swap_ins}
        for i, seq in enumerate(new.sequences):
            self.owner[seq.row] = seq.seq_id
            self.computed[seq.row], self.log_from[seq.row] = new.num_computed[i], new.log_from[i]
            self.last_token[seq.row] = new.last_token[i]
            if seq.row in back:
                self.held[seq.row] = back[seq.row]
                continue
            self.held[seq.row] = []
            for token in seq.token_ids[: new.num_computed[i]]:
                self.held[seq.row].append(content(self.held[seq.row], int(token)))
            self.before[seq.seq_id] = self.events.pop(seq.seq_id, [])
        _scatter(self.tables, output.table_update)
        _scatter(self.log_tables, output.log_update)
        for row in range(output.num_decoding):
            self._store(row, [int(self.last_token[row])])
        first = 0
        for row, length in zip(output.prefill.rows, output.prefill.lengths, strict=True):
            self._store(row, output.prefill.token_ids[first : first + length].tolist())
            first += length
        self.check()
        for seq in output.sampled:
            self.last_token[seq.row] = content(self.held[seq.row], 0) % 97 + 2
        return np.array([self.last_token[seq.row] for seq in output.sampled], np.int32)

    def check(self) -> None:
        """Rows and cached columns hold what they should."""
        for row in range(self.scheduler.rows.num_rows):
            held = [self.memory[self._slot(row, i)] for i in range(len(self.held[row]))]
            assert held == self.held[row]
            assert (self.scheduler.blocks.kv_lens[:, row] == len(held)).all()
        cache = self.scheduler.blocks.prefix_cache
        for digest, column in cache._columns.items() if cache is not None else ():
            now = [self.memory[int(column[0, 0]), i] for i in range(self.size)]
            assert self._published.setdefault(digest, now) == now, "a cached column was written"

    def _swap(self, output: SchedulerOutput) -> None:
        """Blocks to host memory and back; every content, of entries and of logged queries."""
        for task in output.swap_outs:
            self.parked[task.place] = self.held[task.row]
            for device, host in zip(task.device_blocks, task.host_blocks, strict=True):
                entries = {i: self.memory[device, i] for i in self._filled(self.memory, device)}
                logged = {
                    i: self.log_memory[device, i] for i in self._filled(self.log_memory, device)
                }
                self.host[host] = entries, logged
        for task in output.swap_ins:
            for device, host in zip(task.device_blocks, task.host_blocks, strict=True):
                entries, logged = self.host[host]
                self.memory.update({(device, i): entry for i, entry in entries.items()})
                self.log_memory.update({(device, i): query for i, query in logged.items()})

    def _filled(self, memory: Mapping[Slot, object], block: int) -> list[int]:
        return [i for i in range(max(self.size, self.log_size)) if (block, i) in memory]

    def _store(self, row: int, tokens: list[int]) -> None:
        for token in tokens:
            slot = self._slot(row, len(self.held[row]))
            assert self.scheduler.pool.ref[slot[0]] >= 1, "a free block is written"
            self.memory[slot] = content(self.held[row], token)
            self.held[row].append(self.memory[slot])
            position = int(self.computed[row])
            if position >= self.log_from[row]:
                block = self.log_tables[0, row, 0, position // self.log_size]
                assert self.scheduler.pool.ref[block] == 1
                self.log_memory[block, position % self.log_size] = (self.owner[row], position)
            self.computed[row] += 1

    def _compact(self, task: CompactionTask) -> None:
        plan = task.plan
        for e, row in enumerate(task.rows):
            start, windows, length = plan.region_start[e], plan.windows[e], plan.window_len[e]
            old, size, first_query = self.held[row], self.size, plan.query_start[e]
            last_query = first_query + (windows - 1) * length + plan.num_queries[e]
            if self.log_from[row] == NOT_LOGGING:
                first_query = last_query  # this trigger's queries are recomputed, or not needed
            for position in range(first_query, last_query):
                block = self.log_tables[0, row, 0, position // self.log_size]
                logged = self.log_memory[block, position % self.log_size]
                assert logged == (self.owner[row], position), "a needed query is not in the log"
            kept = []
            for w in range(windows):
                first = start + w * length
                kept += old[first : first + length][-plan.keep[e] :]
            new = old[:start] + kept + old[start + windows * length :]
            assert len(old) == task.old_lens[e] and len(new) == task.new_lens[e]
            first_column = task.copy_start[e] // size
            for i in range(task.copy_start[e], len(new)):
                block = task.dst_blocks[0, e, 0, i // size - first_column]
                self.memory[block, i % size] = new[i]
            self.held[row] = new
            self.log_from[row] = task.log_from[e]
            events, before = self.events[self.owner[row]], self.before[self.owner[row]]
            events.append((int(self.computed[row]), int(windows)))
            again = before[: len(events)]
            assert events[: len(again)] == again, "a recomputation did not replay its events"

    def _slot(self, row: int, index: int) -> Slot:
        return int(self.tables[0, row, 0, index // self.size]), index % self.size


def _scatter(tables: IntArray, update: TableUpdate) -> None:
    tables.reshape(-1)[update.indices] = update.blocks


def content(past: list[int], token: int) -> int:
    """What an entry is: its token and everything it could attend to."""
    return hash((*past, token)) & 0xFFFFFFFFFF
