"""A runner without tensors: follows the scheduler's messages and remembers what is where.

Every slot holds the *content* of an entry: a hash of its token and of all that its lane held when
it was computed. Two entries are equal only if they saw the same past, evictions included. A wrong
table, a freed block in use, a shared block written, a misplaced move, or a cached column that was
computed after an eviction shows as a row that does not hold what it should.

A lane is one KV group of a row: all of it (MODEL), a layer of it, or a head in a layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.cache_group import TokenGroup
from kvserve.scheduler.blocks.code_group import CodeGroup
from kvserve.scheduler.blocks.swap_memory import num_places
from kvserve.scheduler.blocks.window_group import NewestGroup, WindowGroup, window_blocks
from kvserve.scheduler.messages.continuation import Continuation, Resumption
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import RowMove, RowMoves, SchedulerOutput, TableUpdate
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.continued_rows import ContinuedRows, NextTurn
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.triggers.trigger import NOT_LOGGING, EventKind

Slot = tuple[int, int]
Lane = tuple[int, int]
Contents = list[dict[int, Any]]
"""Entries, logged queries and what a further group holds of a block, by slot."""


class LeftRow(NamedTuple):
    """What a row held and had lost, who had logged its queries, and its events, as its sequence
    ended."""

    lanes: dict[Lane, list[int]]
    loggers: list[tuple[int, int]]
    events: list[tuple[int, int]]
    seq_id: int
    lost: list[int]


class ShadowRunner:
    """Rows, tables and memory as the device would have them."""

    def __init__(self, scheduler: Scheduler) -> None:
        layout = scheduler.layout
        self.scheduler = scheduler
        self.size = layout.block_size
        self.log_size = scheduler.blocks.log.block_tokens
        self.codes = scheduler.blocks.find(CodeGroup)
        kinds = TokenGroup, WindowGroup, NewestGroup
        self.further = [group for group in scheduler.blocks.groups if type(group) in kinds]
        """At most one: something of every token, or of the newest, which no event evicts."""
        self.further_tables = [np.zeros_like(group.tables[0].blocks) for group in self.further]
        self.further_memory: dict[Slot, tuple[int, int]] = {}
        self.lanes = [(lg, r) for lg in range(layout.layer_groups) for r in range(layout.rows)]
        self.tables: IntArray = np.zeros_like(scheduler.blocks.kv.blocks)
        self.log_tables: IntArray = np.zeros_like(scheduler.blocks.log.blocks)
        self.memory: dict[Slot, int] = {}
        self.log_memory: dict[Slot, tuple[int, int]] = {}
        rows = scheduler.rows.max_rows
        self.owner = np.full(rows, -1)
        self.held: list[dict[Lane, list[int]]] = [self._nothing() for _ in range(rows)]
        self.lost = [[0] for _ in range(rows)]
        """What stands for all that a row has dropped, as it should be."""
        self.remainders = [0] * (rows + num_places(rows, continuations=True))
        """The same as the messages have it: by row, and behind the rows by place."""
        self.computed = np.zeros(rows, int)
        self.log_from = np.zeros(rows, int)
        self.log_stride = np.ones(rows, int)
        self.last_token = np.zeros(rows, int)
        self.coded: list[dict[Lane, int]] = [dict.fromkeys(self.lanes, 0) for _ in range(rows)]
        self.code_memory: dict[Slot, tuple[str, int]] = {}
        """What index slots (an entry's content) and vectors (their number) hold."""
        self.loggers: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
        """Who has logged a row's queries: sequences, and the positions from which on each has."""
        self.parked: dict[int, tuple[dict[Lane, list[int]], list[tuple[int, int]], list[int]]] = {}
        self.host: dict[int, Contents] = {}
        self.events: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.compactions: Counter[int] = Counter()
        """Those of the events that change something, by sequence."""
        self.before: dict[int, list[tuple[int, int]]] = {}
        self.scores: list[IntArray] = []
        """What the events that the last step observed will keep."""
        self._published: dict[bytes, list[int]] = {}
        self.left: dict[Continuation, LeftRow] = {}
        self.resuming: dict[int, Resumption] = {}
        """Rows that go on from a continuation in the step that is scheduled."""
        self.followers = set[int]()
        self.resumed = 0
        self.ahead = np.zeros(rows, int)
        """Confirmed guesses of the last step, which the host counts when it has the tokens."""
        if isinstance(scheduler.saved, ContinuedRows):
            self._follow(scheduler.saved)

    def run(self, output: SchedulerOutput) -> IntArray:
        """Carry out one message; returns a token per sampled sequence."""
        self.ahead[:] = 0
        events, moves = output.events, output.moves
        self._check_sources(events.compactions)
        for task in events.compactions:
            self._compact(task)
        self.scores = [self._observe(task) for task in events.observations]
        for a, b in output.row_swaps:
            fields = self.owner, self.computed, self.log_from, self.log_stride, self.last_token
            for array in fields:
                array[a], array[b] = array[b], array[a]
            self.held[a], self.held[b] = self.held[b], self.held[a]
            self.lost[a], self.lost[b] = self.lost[b], self.lost[a]
            self.remainders[a], self.remainders[b] = self.remainders[b], self.remainders[a]
            self.loggers[a], self.loggers[b] = self.loggers[b], self.loggers[a]
            self.coded[a], self.coded[b] = self.coded[b], self.coded[a]
            self.tables[:, [a, b]] = self.tables[:, [b, a]]
            for tables in (self.log_tables, *self.further_tables):
                tables[:, [a, b]] = tables[:, [b, a]]
        if moves is not None:
            self._swap(moves)
            self._move_remainders(moves.outs, back=False)
        for new in output.admitted.requests:
            self.remainders[new.row] = 0
        self._admit(output)
        if moves is not None:
            self._move_remainders(moves.ins, back=True)
        self.resuming.clear()
        _scatter(self.tables, output.table_updates[0])
        _scatter(self.log_tables, output.table_updates[1])
        for tables in self.further_tables:
            _scatter(tables, output.table_updates[-1])
        verified: list[int] = []
        for row in range(output.num_decoding):
            if output.drafts is None:
                self._store(row, [int(self.last_token[row])])
            else:
                at = int(output.drafts.starts[row])
                chunk = output.drafts.token_ids[at : at + output.drafts.lengths[row]]
                verified += self._verify(row, chunk.tolist())
        first = 0
        for row, length in zip(output.prefill.rows, output.prefill.lengths, strict=True):
            self._store(row, output.prefill.token_ids[first : first + length].tolist())
            first += length
        for task in output.pruned:
            self._prune(task)
        self.check()
        chunks = output.sampled if output.drafts is None else output.sampled[output.num_decoding :]
        for seq in chunks:
            self.last_token[seq.row] = self.next_token(self.held[seq.row])
        return np.array(verified + [self.last_token[seq.row] for seq in chunks], np.int32)

    def next_token(self, held: dict[Lane, list[int]]) -> int:
        """What a row that holds this generates."""
        return content([lane[-1] for lane in held.values()], 0) % 97 + 2

    def _verify(self, row: int, chunk: list[int]) -> list[int]:
        """Store a row's newest token and guesses; what follows each. What was guessed wrong leaves
        marks that nobody may read."""
        assert chunk[0] == self.last_token[row]
        found = []
        for token in chunk:
            self._store(row, [token])
            found.append(self.next_token(self.held[row]))
        right = next(i for i, token in enumerate([*chunk[1:], None]) if token != found[i])
        self.ahead[row], self.last_token[row] = right, found[right]
        for _ in chunk[right + 1 :]:
            self.computed[row] -= 1
            position = int(self.computed[row])
            for slot in self._further_slots(row, position) if self.further else ():
                self.further_memory[slot] = -1, -1
            for lane, held in self.held[row].items():
                held.pop()
                self.memory[self._slot(row, lane, len(held))] = -1
                if self._logs(row, position):
                    self.log_memory[self._query_slot(row, lane, position)] = -1, -1
        return found

    def check(self) -> None:
        """Rows and cached columns hold what they should."""
        for row in range(self.scheduler.rows.num_rows):
            for lane in self.lanes:
                held, coded = self.held[row][lane], self.coded[row][lane]
                raw = range(coded, len(held))
                assert [self.memory[self._slot(row, lane, i)] for i in raw] == held[coded:]
                self._check_codes(row, lane)
                counted = len(held) - self.ahead[row]
                assert self.scheduler.blocks.kv_lens[lane[0], row, lane[1]] == counted
            self._check_held(row)
            self._check_further(row)
            if self.scheduler.rows.leaves_remainder[row]:
                assert self.remainders[row] == self.lost[row][0], "a remainder was lost or mixed up"
        assert len(self.parked) == len(self.scheduler.saved._parked)
        cache = self.scheduler.blocks.prefix_cache
        for digest, column in cache.columns.items():
            blocks = column.ravel()[: len(self.lanes)]
            now = [self.memory[int(b), i] for b in blocks for i in range(self.size)]
            assert self._published.setdefault(digest, now) == now, "a cached column was written"

    def _move_remainders(self, moves: tuple[RowMove, ...], *, back: bool) -> None:
        pairs = [
            (m.row, m.remainder)[:: -1 if back else 1] for m in moves if m.remainder != NO_PLACE
        ]
        found = [self.remainders[source] for source, _ in pairs]
        for (_, to), remainder in zip(pairs, found, strict=True):
            self.remainders[to] = remainder

    def _check_held(self, row: int) -> None:
        """What a row is said to hold is the number of blocks that it names."""
        blocks = self.scheduler.blocks
        tables = [table for group in blocks.groups for table in group.tables]
        named = np.concatenate([table.row_blocks(row) for table in tables])
        assert blocks.blocks_of_rows(row + 1)[row] == len(np.unique(named))

    def _check_further(self, row: int) -> None:
        """A further group holds something of every token so far, or of those that the next sees."""
        rows = self.scheduler.rows
        known = rows.num_tokens[row] - rows.num_unknown[row]
        for group in self.further:
            first = 0
            if isinstance(group, WindowGroup):
                window, computed = group.spec.window, int(self.computed[row])
                first = max(0, computed - window + 1)
                if isinstance(group, NewestGroup):
                    first = computed // window * window
                most = window_blocks(rows.token_ids.shape[1], group.spec)
                assert (group.tables[0].end - group.tables[0].first)[:, row].max() <= most
            for position in range(first, min(int(self.computed[row]), int(known))):
                for slot in self._further_slots(row, position):
                    held = self.further_memory[slot]
                    assert held == (position, rows.token_ids[row, position])

    def _further_slots(self, row: int, position: int) -> list[Slot]:
        """In each of its lanes."""
        (tables,), (group,) = self.further_tables, self.further
        column, place = divmod(position, group.tables[0].block_tokens)
        return [(int(block), place) for block in tables[:, row, :, column].ravel()]

    def _check_codes(self, row: int, lane: Lane) -> None:
        """Codes are where the tables say; a lane's table begins behind them."""
        codes, coded = self.codes, self.coded[row][lane]
        if codes is None:
            return
        at = lane[0], row, lane[1]
        assert codes.coded[at] == coded and coded % self.size == 0
        for i in range(coded):
            block = codes.index.blocks[(*at, i // codes.slots_per_block)]
            held = self.code_memory[int(block), i % codes.slots_per_block]
            assert held == ("entry", self.held[row][lane][i])
        for i in range(codes.num_vectors[at]):
            block = codes.vectors.blocks[(*at, i // codes.vectors_per_block)]
            assert self.code_memory[int(block), i % codes.vectors_per_block] == ("vector", i)
        assert self.scheduler.blocks.kv.first[at] == coded // self.size

    def _observe_codes(self, task: Events) -> IntArray:
        """Entries kept, or coded in addition, and a number of vectors up to the worst case."""
        codes, found = self.codes, np.zeros((*task.old_lens.shape, 2), np.int32)
        assert codes is not None
        for e, row in enumerate(task.rows):
            self._check_queries(task, e)
            for lane in self.lanes:
                held, coded = self.held[row][lane], self.coded[row][lane]
                if task.plan.window_len[e]:
                    entries = self._count(task, e, lane)
                    new = entries // self.size * self.size
                else:
                    entries = (len(held) - coded) // self.size * self.size if coded else 0
                    new = entries
                found[lane[0], e, lane[1]] = entries, held[-1] % (2 * new + 1)
        return found

    def _code(self, task: Events, e: int, row: int, lane: Lane) -> None:
        """Write codes, and a row that begins afresh."""
        codes, tables, at = task.codes, self.codes, (lane[0], e, lane[1])
        assert codes is not None and tables is not None
        held, coded = self.held[row][lane], int(codes.coded[at])
        if task.plan.window_len[e]:
            held = self.held[row][lane] = held[len(held) - task.new_lens[at] :]
            for i in range(coded, len(held)):
                self.memory[int(task.dst_blocks[(*at, i // self.size)]), i % self.size] = held[i]
        assert codes.coded_before[at] == self.coded[row][lane]
        self.coded[row][lane] = coded
        for i in range(codes.coded_before[at], coded):
            block = codes.index_blocks[(*at, i // tables.slots_per_block)]
            self.code_memory[int(block), i % tables.slots_per_block] = "entry", held[i]
        for i in range(codes.vectors_before[at], codes.num_vectors[at]):
            block = codes.vector_blocks[(*at, i // tables.vectors_per_block)]
            self.code_memory[int(block), i % tables.vectors_per_block] = "vector", i

    def _nothing(self) -> dict[Lane, list[int]]:
        return {lane: [] for lane in self.lanes}

    def _admit(self, output: SchedulerOutput) -> None:
        new = output.admitted
        moves = () if output.moves is None else output.moves.ins
        rows = [move for move in moves if move.place != NO_PLACE]
        back = {task.row: self.parked.pop(task.place) for task in rows}
        for i, seq in enumerate(new.requests):
            self.owner[seq.row] = seq.seq_id
            self.computed[seq.row], self.log_from[seq.row] = new.num_computed[i], new.log_from[i]
            self.last_token[seq.row], self.log_stride[seq.row] = (
                new.last_token[i],
                new.log_stride[i],
            )
            if seq.row in back:
                self.held[seq.row], self.loggers[seq.row], self.lost[seq.row] = back[seq.row]
                self.coded[seq.row] = dict.fromkeys(self.lanes, 0)
                continue
            self.held[seq.row], self.lost[seq.row] = self._nothing(), [0]
            self.loggers[seq.row] = [(0, seq.seq_id)]
            self.coded[seq.row] = dict.fromkeys(self.lanes, 0)
            if seq.seq_id in self.resuming:
                self._go_on(seq.seq_id, seq.row, int(new.num_computed[i]))
                continue
            for token in seq.token_ids[: new.num_computed[i]]:
                for held in self.held[seq.row].values():
                    held.append(content(held, int(token)))
            again = self.events.pop(seq.seq_id, [])
            self.before[seq.seq_id] = [] if seq.seq_id in self.followers else again
            self.followers.discard(seq.seq_id)  # one that begins anew
            self.compactions[seq.seq_id] = 0

    def _swap(self, moves: RowMoves) -> None:
        """Blocks to host memory and back; every content, of entries and of logged queries."""
        for place in moves.discarded:
            del self.parked[place]
        for task in moves.outs:
            if task.place != NO_PLACE:
                row = task.row
                self.parked[task.place] = self.held[row], self.loggers[row], self.lost[row]
                self.held[task.row] = self._nothing()
            for device, host in zip(task.device_blocks, task.host_blocks, strict=True):
                self.host[host] = self._contents(device)
        copied = [self._contents(block) for block in moves.copy_from]
        for block, contents in zip(moves.copy_to, copied, strict=True):
            self._put(block, contents)
        for task in moves.ins:
            for device, host in zip(task.device_blocks, task.host_blocks, strict=True):
                self._put(device, self.host[host])

    def _contents(self, block: int) -> Contents:
        filled = [(memory, self._filled(memory, block)) for memory in self._memories]
        return [{i: memory[block, i] for i in slots} for memory, slots in filled]

    def _put(self, block: int, contents: Contents) -> None:
        for memory, held in zip(self._memories, contents, strict=True):
            memory.update({(block, i): entry for i, entry in held.items()})

    @property
    def _memories(self) -> list[dict[Slot, Any]]:
        return [self.memory, self.log_memory, self.further_memory]

    def _follow(self, saved: ContinuedRows) -> None:
        """Remember what rows hold as they are left, and who goes on from which."""
        save_row, resume_row = saved.save_row, saved.resume_row

        def left(seq: Sequence) -> None:
            save_row(seq)
            newest = max(saved.store.all, key=lambda known: known.used, default=None)
            if newest is not None and newest not in self.left:
                # What is still to come of a step that is being scheduled comes here too.
                row, events = seq.row, self.events[seq.seq_id]
                who = events, seq.seq_id, self.lost[row]
                # Tokens behind a stop token were confirmed, and are not the sequence's.
                over = max(0, int(self.computed[row] - self.scheduler.rows.num_computed[row]))
                held = {lane: x[: len(x) - over] for lane, x in self.held[row].items()}
                self.left[newest] = LeftRow(held, self.loggers[row], *who)

        def seated(seq: Sequence, turn: NextTurn) -> int:
            self.resuming[seq.seq_id] = turn.resumption
            return resume_row(seq, turn)

        saved.save_row = left  # type: ignore[method-assign]
        saved.resume_row = seated  # type: ignore[method-assign]

    def _go_on(self, seq_id: int, row: int, computed: int) -> None:
        """A row begins with what another one held, less its newest tokens."""
        known, num_tokens = self.resuming[seq_id]
        left, dropped = self.left[known], len(known.token_ids) - num_tokens
        assert computed == num_tokens
        self.held[row] = {lane: held[: len(held) - dropped] for lane, held in left.lanes.items()}
        for lane, held in self.held[row].items():
            assert self.scheduler.blocks.kv_lens[lane[0], row, lane[1]] >= len(held) > 0
        self.lost[row] = list(left.lost)
        self.loggers[row] = [(start, who) for start, who in left.loggers if start < computed]
        self.loggers[row].append((computed, seq_id))
        self.before[seq_id] = self.events.pop(seq_id, [])
        self.events[seq_id] = list(left.events)
        self.compactions[seq_id] = self.compactions[left.seq_id]
        self.followers.add(seq_id)
        self.resumed += 1

    def _logger(self, row: int, position: int) -> int:
        return next(who for start, who in reversed(self.loggers[row]) if start <= position)

    def _filled(self, memory: Mapping[Slot, object], block: int) -> list[int]:
        return [i for i in range(max(self.size, self.log_size)) if (block, i) in memory]

    def _store(self, row: int, tokens: list[int], stored: list[Lane] | None = None) -> None:
        """Keys and values in all lanes, or those of ``stored``; queries in all."""
        for token in tokens:
            position = int(self.computed[row])
            for slot in self._further_slots(row, position) if self.further else ():
                assert self.scheduler.pool.ref[slot[0]] >= 1, "a free block is written"
                self.further_memory[slot] = position, token
            for lane in self.lanes:
                held = self.held[row][lane]
                if stored is None or lane in stored:
                    slot = self._slot(row, lane, len(held))
                    assert self.scheduler.pool.ref[slot[0]] >= 1, "a free block is written"
                    held.append(content(held, token))
                    self.memory[slot] = held[-1]
                if self._logs(row, position):
                    query_slot = self._query_slot(row, lane, position)
                    assert self.scheduler.pool.ref[query_slot[0]] == 1
                    self.log_memory[query_slot] = (self._logger(row, position), position)
            self.computed[row] += 1

    def _prune(self, task: Events) -> None:
        """A whole prompt, of which each lane stores the newest tokens."""
        (row,), (count,) = task.rows.tolist(), task.old_lens.max(axis=(0, 2)).tolist()
        assert task.token_ids is not None and not self.computed[row]
        tokens, self.log_from[row] = task.token_ids[0].tolist(), task.log_from[0]
        assert len(tokens) == count
        kept = {lane: int(task.new_lens[lane[0], 0, lane[1]]) for lane in self.lanes}
        for token in tokens:
            left = count - int(self.computed[row])
            self._store(row, [token], [lane for lane in self.lanes if left <= kept[lane]])
        self._note_event(row, 1, bool(task.compacts[0]))

    def _observe(self, task: Events) -> IntArray:
        """Counts that depend on what each lane holds, near what the plan says."""
        if task.kind is EventKind.CODED:
            return self._observe_codes(task)
        if task.kind is EventKind.BLOCKS:
            return self._observe_blocks(task)
        counts = np.zeros_like(task.old_lens)
        for e in range(len(task.rows)):
            self._check_queries(task, e)
            for lane in self.lanes:
                counts[lane[0], e, lane[1]] = self._count(task, e, lane)
        return counts

    def _observe_blocks(self, task: Events) -> IntArray:
        """Kept columns: as many as the plan's entries fill, which ones differs by lane."""
        most = int(-(-task.plan.keep.max() // self.size))
        columns = np.full((*task.old_lens.shape, most), -1)
        for e in range(len(task.rows)):
            self._check_queries(task, e)
            for lane in self.lanes:
                found = self._columns(task, e, lane)
                columns[lane[0], e, lane[1], : len(found)] = found
        return columns

    def _columns(self, task: Events, e: int, lane: Lane) -> list[int]:
        """Whole blocks by their last content, then the partial one."""
        held = self.held[task.rows[e]][lane]
        whole, tail = divmod(len(held), self.size)
        count = (int(task.plan.keep[e]) - tail) // self.size
        ranked = sorted(range(whole), key=lambda column: held[(column + 1) * self.size - 1])
        return sorted(ranked[:count]) + [whole] * (tail > 0)

    def _count(self, task: Events, e: int, lane: Lane) -> int:
        held = self.held[task.rows[e]][lane]
        keep = int(task.plan.keep[e]) + held[-1] % 5 - 2
        return min(max(keep, 1), len(held) - int(task.plan.region_start[e]))

    def _check_sources(self, tasks: tuple[Events, ...]) -> None:
        """No event writes a block that another has yet to read: those of a task run side by side,
        one task after the other. (An event may write what it reads itself.)"""
        events = [(i, e, task) for i, task in enumerate(tasks) for e in range(len(task.rows))]
        reads = [self._read_by(task, e) for _, e, task in events]
        for number, e, task in events:
            written = self._written_by(task, e)
            for (other, f, _), read in zip(events, reads, strict=True):
                later = other > number or (other == number and f != e)
                both = written & read if later else set()
                assert not both, f"an event writes {both}, which another is still to read"

    def _read_by(self, task: Events, e: int) -> set[int]:
        """Blocks that an event reads: entries from its region on, and logged queries. What becomes
        codes has been read when it was observed."""
        if task.codes is not None:
            return set()
        row, plan = task.rows[e], task.plan
        read: list[int] = []
        if self.log_from[row] != NOT_LOGGING:
            end = plan.query_start[e] + (plan.windows[e] - 1) * plan.window_len[e]
            end += plan.num_queries[e]
            places = (self._log_place(row, at) for at in (plan.query_start[e], end))
            columns = slice(next(places) // self.log_size, -(-next(places) // self.log_size))
            read = self.log_tables[:, row, :, columns].ravel().tolist()
        for group, table in self.lanes:
            end = -(-len(self.held[row][group, table]) // self.size)
            columns = slice(plan.region_start[e] // self.size, end)
            read += self.tables[group, row, table, columns].tolist()
        return set(read) - {0}

    def _written_by(self, task: Events, e: int) -> set[int]:
        """Blocks that an event writes."""
        if task.kind is EventKind.BLOCKS:
            return set()
        written: list[int] = []
        for lane in self.lanes:
            at = lane[0], e, lane[1]
            first, codes = task.copy_start[e] // self.size, task.codes
            columns = -(-task.new_lens[at] // self.size)
            if codes is not None:
                assert self.codes is not None
                slots, vectors = self.codes.slots_per_block, self.codes.vectors_per_block
                made = slice(codes.coded_before[at] // slots, -(-codes.coded[at] // slots))
                written += codes.index_blocks[at][made].tolist()
                made = slice(
                    codes.vectors_before[at] // vectors, -(-codes.num_vectors[at] // vectors)
                )
                written += codes.vector_blocks[at][made].tolist()
                if not task.plan.window_len[e]:
                    continue  # entries stay where they are
                first = codes.coded[at] // self.size
            there = slice(first - task.copy_start[e] // self.size, columns)
            written += task.dst_blocks[at][there][: columns - first].tolist()
        return set(written) - {0}

    def _compact(self, task: Events) -> None:
        plan = task.plan
        for e, row in enumerate(task.rows):
            self._check_queries(task, e)
            start, windows, length = plan.region_start[e], plan.windows[e], plan.window_len[e]
            for lane in self.lanes:
                if task.codes is not None:
                    self._code(task, e, row, lane)
                    continue
                at = (lane[0], e, lane[1])
                old = self.held[row][lane]
                if task.kind is EventKind.BLOCKS:
                    columns = self._columns(task, e, lane)
                    new = [x for c in columns for x in old[c * self.size : (c + 1) * self.size]]
                elif not task.kind.is_even:
                    assert task.new_lens[at] - start == self._count(task, e, lane), "stale counts"
                    new = old[:start] + old[len(old) - (task.new_lens[at] - start) :]
                else:
                    new = old[:start]
                    for first in range(start, start + windows * length, length):
                        new = new + old[first : first + length][-plan.keep[e] :]
                    new = new + old[start + windows * length :]
                assert len(old) == task.old_lens[at] and len(new) == task.new_lens[at]
                if dropped := sorted({*old} - {*new}):
                    for of, at_row in ((self.lost[row], 0), (self.remainders, row)):
                        of[at_row] = content([of[at_row]], content(dropped, 0))
                first_column = task.copy_start[e] // self.size
                for i in range(task.copy_start[e], len(new)):
                    block = task.dst_blocks[(*at, i // self.size - first_column)]
                    self.memory[block, i % self.size] = new[i]
                self.held[row][lane] = new
            self.log_from[row] = task.log_from[e]
            self._note_event(row, int(windows), bool(task.compacts[e]))

    def _note_event(self, row: int, windows: int, compacts: bool) -> None:
        self.compactions[int(self.owner[row])] += compacts
        events, before = self.events[self.owner[row]], self.before[self.owner[row]]
        events.append((int(self.computed[row]), windows))
        again = before[: len(events)]
        assert events[: len(again)] == again, "a recomputation did not replay its events"

    def _check_queries(self, task: Events, e: int) -> None:
        """The queries that score an event's windows are in the log, if this trigger logs them."""
        row, plan = task.rows[e], task.plan
        if self.log_from[row] == NOT_LOGGING:
            return
        first = plan.query_start[e]
        last = first + (plan.windows[e] - 1) * plan.window_len[e] + plan.num_queries[e]
        for position in filter(partial(self._logs, row), range(first, last)):
            for lane in self.lanes:
                logged = self.log_memory[self._query_slot(row, lane, position)]
                assert logged == (self._logger(row, position), position), (
                    "a needed query is not in the log"
                )

    def _slot(self, row: int, lane: Lane, index: int) -> Slot:
        column = index // self.size
        return int(self.tables[lane[0], row, lane[1], column]), index % self.size

    def _query_slot(self, row: int, lane: Lane, position: int) -> Slot:
        column, place = divmod(self._log_place(row, position), self.log_size)
        return int(self.log_tables[lane[0], row, lane[1], column]), place

    def _logs(self, row: int, position: int) -> bool:
        """Whether the token is the last of so many."""
        behind, stride = position - self.log_from[row], self.log_stride[row]
        return bool(behind >= 0 and (behind + 1) % stride == 0)

    def _log_place(self, row: int, position: int) -> int:
        first, stride = self.log_from[row], self.log_stride[row]
        return int(first // stride + (position - first) // stride)


def _scatter(tables: IntArray, update: TableUpdate) -> None:
    tables.reshape(-1)[update.indices] = update.blocks


def content(past: list[int], token: int) -> int:
    """What an entry is: its token and everything it could attend to."""
    return hash((*past, token)) & 0xFFFFFFFFFF
