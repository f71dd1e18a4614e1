"""The catch-up scheduler: every sequence computes until its cache holds all its known tokens.

There is no prefill phase and no decode phase, only ``num_computed`` catching up with
``num_tokens``; chunked prefill and recomputation after a preemption fall out of it. Compactions
come first, and what they free serves the same step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import numpy as np

from kvserve.scheduler.admission import Admission
from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.block_pool import BlockPool, IntArray
from kvserve.scheduler.chunks import Chunks
from kvserve.scheduler.event_plans import Booked
from kvserve.scheduler.events import EventBook
from kvserve.scheduler.gate import BreakEvenGate
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import SchedulerOutput
from kvserve.scheduler.prefix_cache import PrefixCache
from kvserve.scheduler.prefixes import Prefixes
from kvserve.scheduler.queue import WaitingQueue
from kvserve.scheduler.rows import RowTable
from kvserve.scheduler.sequence import Sequence, SequenceStatus
from kvserve.scheduler.swap_space import SwapSpace
from kvserve.scheduler.trigger import NO_EVENT, Trigger


class Scheduler:
    """Owns the queue, the rows and the blocks; ``schedule`` and ``update`` alternate.

    A step may be scheduled while the tokens of one before it are unknown, no more: what depends on
    them waits. Who ends with such a token has computed one in vain, which ``update`` ignores.

    When blocks run out, in this order: prefix columns that nobody uses are dropped, optional events
    come early, and the newest sequence of the lowest priority makes way: a compressed one to host
    memory if its blocks fit there, others (and those that do not fit) to be computed again.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        log_block_tokens: int,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        max_observed_tokens: int | None = None,
        gate: BreakEvenGate | None = None,
        admission_reserve: int = 32,
        code_slots: int = 0,
        code_scratch: bool = True,
    ) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.blocks = BlockManager(
            layout,
            self.pool,
            max_num_seqs,
            max_model_len,
            log_block_tokens,
            PrefixCache(self.pool) if prefix_caching else None,
            code_slots,
            code_scratch,
        )
        self.rows = RowTable(max_num_seqs, max_model_len, self.blocks)
        self.events = EventBook(
            self.rows, self.blocks, max_observed_tokens or max_num_batched_tokens, gate
        )
        self.swap = SwapSpace(num_host_blocks, self.rows, self.blocks)
        self.waiting = WaitingQueue()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swaps = 0
        self._prefixes = Prefixes(self.rows, self.blocks)
        self._admission = Admission(
            self.rows,
            self.blocks,
            self.events,
            self._prefixes,
            self.swap,
            reserve=admission_reserve,
            chunked=chunked_prefill,
        )
        self._chunks = Chunks(self.rows, self.blocks, self.events, self._prefixes, self._admission)
        self._max_tokens = max_num_batched_tokens
        self._arrivals = 0
        # Who ended since the last step, and whom the next update reports for outgrowing the pool.
        self._finished: list[Sequence] = []
        self._outgrown: list[Sequence] = []

    # ---- requests ----------------------------------------------------------------------------

    def blocks_at_least(self, num_prompt: int, max_len: int, trigger: Trigger) -> int:
        """Blocks without which a sequence cannot get past its prompt and its first event."""
        return self._admission.blocks_at_least(num_prompt, max_len, trigger)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it can fit at all."""
        seq.arrival = self._arrivals
        self._arrivals += 1
        self.events.register(seq)
        self.waiting.add(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now and free its blocks; its row is given away by the next step."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
            if seq in self.swap:
                self.swap.discard(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._prefixes.publish(seq, int(self.rows.num_computed[seq.row]))
            self._empty_row(seq)
            self._finished.append(seq)
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows.num_rows)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row and go on."""
        return [seq for seq in self.rows.live() if seq.status is SequenceStatus.RUNNING]

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes; tables and lengths are those after it."""
        rows = self.rows
        in_flight = self.events.observing or bool(rows.num_unknown[: rows.num_rows].any())
        booked = self._compact()
        self._drop_finished()
        rows.demote_waiting()
        rows.promote_ready()
        self._make_room_for_decodes()
        decoding = np.arange(rows.num_decoding, dtype=np.int32)
        in_front = slice(rows.num_decoding)
        self.blocks.grow(in_front, np.ones_like(decoding), rows.num_computed[in_front])
        self.blocks.advance_first(rows.num_decoding)
        rows.num_computed[in_front] += 1
        chunks = self._schedule_chunks()
        # Observing what then finds no blocks, again and again, is no progress.
        starving = self.events.starving and rows.num_rows > 1
        moves_on = len(decoding) or (booked.observations and not starving)
        # Who waits for a step that is on its way can say nothing yet.
        moves_on = moves_on or in_flight
        if starving and not (moves_on or chunks or self._admission.has_new):
            self._preempt()
            moves_on = True
        while not (moves_on or chunks or self._admission.has_new) and rows.num_rows:
            # Chunks hold each other's blocks: the newest makes way until the oldest can go on.
            self._preempt()
            chunks = self._schedule_chunks()
        admitted = self._admission.take_new_rows()
        pruned = self._chunks.take_pruned(chunks)
        prefill = self._chunks.batch(chunks)
        caught_up = np.concatenate([prefill.rows, *(task.rows for task in pruned)])
        complete = rows.num_computed[caught_up] == rows.num_tokens[caught_up]
        sampled = np.concatenate([decoding, caught_up[complete]])
        sampled_at = rows.num_tokens[sampled]
        rows.caught_up[sampled] = 1
        rows.num_tokens[sampled] += 1
        rows.num_unknown[sampled] += 1
        n = rows.num_rows
        np.maximum(rows.peak_blocks[:n], self.blocks.held(n), out=rows.peak_blocks[:n])
        discarded, swap_outs, swap_ins = self.swap.take_tasks()
        scheduled = np.concatenate([decoding, prefill.rows])
        index_update, vector_update, num_coded = self.blocks.take_code_updates(n, scheduled)
        self.num_steps += 1
        return SchedulerOutput(
            compactions=booked.compactions,
            observations=booked.observations,
            row_swaps=rows.take_swaps(),
            discarded=discarded,
            swap_outs=swap_outs,
            swap_ins=swap_ins,
            admitted=admitted,
            table_update=self.blocks.kv.take_update(n),
            log_update=self.blocks.log.take_update(n),
            index_update=index_update,
            vector_update=vector_update,
            num_coded=num_coded,
            num_decoding=len(decoding),
            prefill=prefill,
            columns=self.blocks.columns_in_use(n)[scheduled],
            logs_queries=self.blocks.logs_queries(n),
            pruned=pruned,
            sampled_chunks=np.flatnonzero(complete),
            sampled=tuple(map(rows.owner, sampled.tolist())),
            sampled_at=sampled_at,
        )

    def update(
        self, output: SchedulerOutput, token_ids: IntArray, kept_counts: Iterable[IntArray] = ()
    ) -> list[Sequence]:
        """Take in the sampled tokens, in the order of ``output.sampled``; return who finished.

        ``kept_counts [LG, E, R]`` is what each of ``output.observations`` will leave.
        """
        rows = self.rows
        self.events.take_counts(output.observations, kept_counts)
        finished, self._outgrown = self._outgrown, []
        sequences, places = output.sampled, output.sampled_at
        running = [seq.status is SequenceStatus.RUNNING for seq in sequences]
        if not all(running):
            finished += self._learn_late(output, token_ids)
            sequences = tuple(compress(sequences, running))
            places, token_ids = places[running], token_ids[running]
        at = np.fromiter((seq.row for seq in sequences), np.int32, len(sequences))
        rows.token_ids[at, places] = token_ids
        rows.num_unknown[at] -= 1
        stopped = (rows.stop_ids[at] == token_ids[:, None]).any(axis=1)
        for i in np.flatnonzero(stopped | (places + 1 >= rows.max_len[at])):
            self._end(sequences[i], int(token_ids[i]) if stopped[i] else None)
            finished.append(sequences[i])
        return finished

    def give_up(self, output: SchedulerOutput) -> tuple[Sequence | None, list[Sequence]]:
        """Take back a step that failed on the device; return its newest sequence, which ends here
        (reason ``error``; none if all have ended), and all who have ended since the last step.

        Nobody knows how much of the step was done: every other sequence computes its cache anew,
        with the events that it had, and neither cached nor parked blocks are used again.
        """
        rows = self.rows
        sampled = [seq.row for seq in output.sampled]
        rows.num_tokens[sampled] -= 1
        rows.num_unknown[sampled] -= 1
        self.events.forget_observed(output.observations)
        computed = (output.prefill.rows, *(task.rows for task in output.pruned))
        at = {*range(output.num_decoding), *np.concatenate(computed).tolist()}
        computing = [seq for seq in self.running if not at or seq.row in at]
        newest = max(computing, key=lambda seq: seq.arrival, default=None)
        for seq in self.running:
            if seq is newest:
                self.finish(seq, "error")
            else:
                self._begin_anew(seq)
        self._drop_finished()
        for seq in self.waiting:
            if seq in self.swap:
                self.swap.discard(seq)
        if self.blocks.prefix_cache is not None:
            self.blocks.prefix_cache.clear()
        finished, self._outgrown = self._outgrown, []
        return newest, finished

    def check_integrity(self) -> None:
        """Blocks, lengths and rows agree; for tests and for idle moments."""
        self.blocks.check_integrity()
        self.swap.check_integrity()
        n = self.rows.num_rows
        assert self.rows.num_decoding <= n
        assert all(seq.row == row for row, seq in enumerate(self.rows.live()))
        assert not self.blocks.kv.end[:, n:].any(), "a row without a sequence holds blocks"

    # ---- rows --------------------------------------------------------------------------------

    def _empty_row(self, seq: Sequence) -> None:
        """Write a row's tokens and counts to its sequence and free its blocks."""
        self.rows.save(seq)
        lens = self.blocks.kv_lens[:, seq.row]
        per_entry = self.layout.layers_per_block * self.layout.heads_per_block
        seq.held_entries = int(lens.sum()) * per_entry
        seq.held_tokens = -(-int(lens.sum()) // lens.size)
        seq.held_blocks = int(self.blocks.held(seq.row + 1)[seq.row])
        seq.coded_entries, seq.codebook_entries = self.blocks.num_coded(seq.row)
        self.blocks.release_row(seq.row)
        self.rows.next_event[seq.row], self.rows.caught_up[seq.row] = NO_EVENT, 0

    def _drop_finished(self) -> None:
        for seq in self._finished:
            self.rows.drop(seq)
        self._finished.clear()

    def _preempt(self) -> None:
        """Send the newest of the lowest priority back to the queue; the only one left ends."""
        rows, n = self.rows, self.rows.num_rows
        seq = rows.owner(np.lexsort((rows.arrival[:n], rows.priority[:n]))[-1])
        if n == 1 and rows.num_unknown[seq.row]:
            rows.num_decoding = 0  # it sits the step out: its token may be its last
            return
        if n == 1:
            self._outgrow(seq)
            self._drop_finished()
            return
        coded, _ = self.blocks.num_coded(seq.row)
        if rows.compactions[seq.row] and not coded and self.swap.park(seq):
            self.num_swaps += 1
        self._begin_anew(seq)

    def _begin_anew(self, seq: Sequence) -> None:
        """Back to the queue, its row and blocks given away."""
        seq.replay_until = max(seq.replay_until, int(self.rows.num_computed[seq.row]))
        seq.awaits_token = bool(self.rows.num_unknown[seq.row])
        self._empty_row(seq)
        self.rows.drop(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.add(seq)
        self.num_preemptions += 1

    def _learn_late(self, output: SchedulerOutput, token_ids: IntArray) -> list[Sequence]:
        """Tokens of sequences that have lost their rows meanwhile; returns whom that ends."""
        late = [
            (seq, int(token))
            for seq, token in zip(output.sampled, token_ids, strict=True)
            if seq.status is SequenceStatus.WAITING
        ]
        for seq, token in late:
            seq.token_ids[-1], seq.awaits_token = token, False
            stopped = token in seq.stop_token_ids
            if stopped or seq.num_tokens >= seq.max_len:
                self._end(seq, token if stopped else None)
        return [seq for seq, _ in late if seq.status is SequenceStatus.FINISHED]

    def _end(self, seq: Sequence, stop_token: int | None) -> None:
        """A sequence has its last token."""
        seq.stop_token = stop_token
        self.finish(seq, "length" if stop_token is None else "stop")

    def _outgrow(self, seq: Sequence) -> None:
        """End a sequence that the whole pool cannot hold any longer."""
        self.finish(seq, "length")
        self._outgrown.append(seq)

    # ---- blocks and chunks -------------------------------------------------------------------

    def _compact(self) -> Booked:
        """Events that are due, and early ones if this step's decodes would find no blocks."""
        self.events.take_engine_wide()
        entries = self.pool.capacity * self.layout.block_size // self.layout.groups
        booked = self.events.compact_due(entries if self.waiting else 0)
        missing = self._missing(self.rows.decoding_next())
        if missing:
            early = self.events.compact_early(missing)
            booked = Booked(booked.compactions + early, booked.observations)
        return booked

    def _missing(self, at: IntArray) -> int:
        """Blocks that cannot be had for one more token in each of the rows ``at``."""
        if 2 * len(at) * self.layout.groups <= self.pool.num_free:
            return 0  # a token wants a block of entries and one of logged queries at most
        wanted = self.blocks.wanted(at, np.ones_like(at), self.rows.num_computed[at])
        return 0 if self.blocks.have_free(wanted) else wanted - self.pool.num_free

    def _make_room_for_decodes(self) -> None:
        while self._missing(np.arange(self.rows.num_decoding, dtype=np.int32)):
            self._preempt()

    def _schedule_chunks(self) -> list[tuple[int, int]]:
        """Rows that catch up in this step, oldest first, and how many tokens of each."""
        rows = self.rows
        budget = self._max_tokens - rows.num_decoding
        chunks = []
        at = np.arange(rows.num_decoding, rows.num_rows)
        at = at[rows.caught_up[at] == 0]
        for row in at[np.lexsort((rows.arrival[at], rows.priority[at]))].tolist():
            length = self._chunks.reserve(row, budget)
            if length:
                chunks.append((row, length))
                budget -= length
        if self.events.starving:  # newcomers would take what it waits for
            return chunks
        while self.waiting and budget > 0 and rows.num_rows < rows.max_rows:
            seq = self.waiting.first
            if seq.awaits_token:
                break
            if not self._admission.admit(seq, budget):
                if not rows.num_rows:
                    self._outgrow(seq)
                break
            self.waiting.remove(seq)
            if not rows.caught_up[seq.row]:
                length = self._chunks.reserve(seq.row, budget)
                chunks.append((seq.row, length))
                budget -= length
        return chunks
