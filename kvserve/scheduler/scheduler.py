"""The catch-up scheduler: every sequence computes until its cache holds all its known tokens.

There is no prefill phase and no decode phase, only ``num_computed`` catching up with
``num_tokens``; chunked prefill and recomputation after a preemption fall out of it. Compactions
come first, at logical positions of the sequence itself, and what they free serves the same step.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.block_pool import BlockPool, IntArray
from kvserve.scheduler.events import EventBook
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import PrefillBatch, SchedulerOutput
from kvserve.scheduler.prefix_cache import PrefixCache, column_hashes
from kvserve.scheduler.rows import RowTable
from kvserve.scheduler.sequence import Sequence, SequenceStatus
from kvserve.scheduler.trigger import NO_EVENT, RowState, Trigger


class Scheduler:
    """Owns the queue, the rows and the blocks; ``schedule`` and ``update`` alternate.

    A newcomer is admitted only beside ``admission_reserve`` tokens of growth of every running
    sequence (fewer where its next event or its end comes first): less admits more and preempts
    more. Waiting for a whole window would keep out what compression makes room for.
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
        admission_reserve: int = 32,
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
        )
        self.rows = RowTable(max_num_seqs, max_model_len, self.blocks)
        self.events = EventBook(self.rows, self.blocks)
        self.waiting: deque[Sequence] = deque()
        self.num_steps = 0
        self.num_preemptions = 0
        self._max_tokens = max_num_batched_tokens
        self._chunked = chunked_prefill
        self._reserve = admission_reserve
        self._arrivals = 0
        # What the next output tells the runner, and what the next update tells the caller.
        self._admitted: list[Sequence] = []
        self._finished: list[Sequence] = []
        self._outgrown: list[Sequence] = []

    # ---- requests ----------------------------------------------------------------------------

    def blocks_at_least(self, num_prompt: int, max_len: int, trigger: Trigger) -> int:
        """Blocks without which a sequence cannot get past its prompt and its first event."""
        first_event, log_from = _first_event(num_prompt, trigger)
        tokens = num_prompt + 1 if first_event == NO_EVENT else min(first_event, max_len)
        return self._blocks_alone(tokens, log_from)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it can fit at all."""
        seq.arrival = self._arrivals
        self._arrivals += 1
        self.events.register(seq)
        self.waiting.append(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now and free its blocks; its row is given away by the next step."""
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._publish(seq, int(self.rows.num_computed[seq.row]))
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
        self.events.take_engine_wide()
        compactions = self.events.compact_due()
        self._drop_finished()
        rows.demote_due()
        rows.promote_ready()
        self._make_room_for_decodes()
        decoding = np.arange(rows.num_decoding, dtype=np.int32)
        self._compute(decoding, np.ones_like(decoding))
        chunks = self._schedule_chunks()
        while not chunks and not len(decoding) and rows.num_rows:
            # Chunks hold each other's blocks: the newest makes way until the oldest can go on.
            self._preempt_newest()
            chunks = self._schedule_chunks()
        prefill = self._prefill_batch(chunks)
        complete = rows.num_computed[prefill.rows] == rows.num_tokens[prefill.rows]
        sampled = np.concatenate([decoding, prefill.rows[complete]])
        rows.caught_up[sampled] = 1
        rows.num_tokens[sampled] += 1
        n = rows.num_rows
        np.maximum(rows.peak_blocks[:n], self.blocks.held(n), out=rows.peak_blocks[:n])
        output = SchedulerOutput(
            compactions=compactions,
            row_swaps=rows.take_swaps(),
            admitted=tuple(self._admitted),
            admitted_computed=np.array([seq.num_cached_tokens for seq in self._admitted], np.int32),
            admitted_log_from=self.blocks.logged_from([seq.row for seq in self._admitted]),
            table_update=self.blocks.kv.take_update(n),
            log_update=self.blocks.log.take_update(n),
            num_decoding=len(decoding),
            prefill=prefill,
            columns=self.blocks.columns_in_use(np.concatenate([decoding, prefill.rows])),
            logs_queries=bool(self.blocks.log.held(n).any()),
            sampled_chunks=np.flatnonzero(complete),
            sampled=tuple(rows.sequences[row] for row in sampled),
        )
        self._admitted.clear()
        self.num_steps += 1
        return output

    def update(self, output: SchedulerOutput, token_ids: IntArray) -> list[Sequence]:
        """Take in the sampled tokens, in the order of ``output.sampled``; return who finished."""
        rows = self.rows
        at = np.fromiter((seq.row for seq in output.sampled), np.int32, len(output.sampled))
        lengths = rows.num_tokens[at]
        rows.token_ids[at, lengths - 1] = token_ids
        stopped = (rows.stop_ids[at] == token_ids[:, None]).any(axis=1)
        finished, self._outgrown = self._outgrown, []
        for i in np.flatnonzero(stopped | (lengths >= rows.max_len[at])):
            seq = output.sampled[i]
            seq.stop_token = int(token_ids[i]) if stopped[i] else None
            self.finish(seq, "stop" if stopped[i] else "length")
            finished.append(seq)
        return finished

    def check_integrity(self) -> None:
        """Blocks, lengths and rows agree; for tests and for idle moments."""
        self.blocks.check_integrity()
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
        self.blocks.release_row(seq.row)
        self.rows.next_event[seq.row] = NO_EVENT

    def _drop_finished(self) -> None:
        for seq in self._finished:
            self.rows.drop(seq)
        self._finished.clear()

    def _preempt_newest(self) -> None:
        """Send the newest sequence back to the queue; the only one left ends instead."""
        rows = self.rows
        seq = rows.live()[int(rows.arrival[: rows.num_rows].argmax())]
        if rows.num_rows == 1:
            self._outgrow(seq)
            self._drop_finished()
            return
        self._empty_row(seq)
        rows.drop(seq)
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    # ---- blocks and chunks -------------------------------------------------------------------

    def _compute(self, at: IntArray, lengths: IntArray) -> None:
        """Store ``lengths`` more tokens in rows ``at``."""
        self.blocks.grow(at, lengths, self.rows.num_computed[at])
        self.blocks.advance(at, lengths)
        self.rows.num_computed[at] += lengths

    def _make_room_for_decodes(self) -> None:
        while self.rows.num_decoding:
            at = np.arange(self.rows.num_decoding, dtype=np.int32)
            computed = self.rows.num_computed[at]
            if self.blocks.have_free(self.blocks.wanted(at, np.ones_like(at), computed)):
                return
            self._preempt_newest()

    def _schedule_chunks(self) -> list[tuple[int, int]]:
        """Rows that catch up in this step, oldest first, and how many tokens of each."""
        rows = self.rows
        budget = self._max_tokens - rows.num_decoding
        chunks = []
        catching_up = range(rows.num_decoding, rows.num_rows)
        for row in sorted(catching_up, key=rows.arrival.__getitem__):
            length = self._continue(row, budget)
            if length:
                chunks.append((row, length))
                budget -= length
                self._publish_chunk(row, length)
        while self.waiting and budget > 0 and rows.num_rows < rows.max_rows:
            admitted = self._admit(budget)
            if admitted is None:
                break
            chunks.append(admitted)
            budget -= admitted[1]
            self._publish_chunk(*admitted)
        return chunks

    def _prefill_batch(self, chunks: list[tuple[int, int]]) -> PrefillBatch:
        at = np.array([row for row, _ in chunks], np.int32)
        lengths = np.array([length for _, length in chunks], np.int32)
        starts = self.rows.num_computed[at]
        self._compute(at, lengths)
        tokens = [
            self.rows.token_ids[row, start : start + length]
            for row, start, length in zip(at, starts, lengths, strict=True)
        ]
        return PrefillBatch(at, starts, lengths, np.concatenate([np.zeros(0, np.int32), *tokens]))

    def _chunk_length(self, computed: int, known: int, next_event: int, budget: int) -> int:
        """Tokens to compute now; a chunk ends where an event is due."""
        length = min(int(known), int(next_event)) - int(computed)
        if length > budget:
            return budget if self._chunked else 0
        return length

    def _continue(self, row: int, budget: int) -> int:
        """Reserve the blocks of a row's next chunk; returns its length, 0 if it has to wait."""
        rows, at = self.rows, np.array([row], np.int32)
        length = self._chunk_length(
            rows.num_computed[row], rows.num_tokens[row], rows.next_event[row], budget
        )
        new = np.array([length], np.int32)
        if not self.blocks.have_free(self.blocks.wanted(at, new, rows.num_computed[at])):
            return 0
        self.blocks.grow(at, new, rows.num_computed[at])
        return length

    def _admit(self, budget: int) -> tuple[int, int] | None:
        """Give the oldest waiting sequence a row and the blocks of its prompt, if there is room."""
        seq, rows = self.waiting[0], self.rows
        stop, log_from = _first_event(seq.num_prompt_tokens, seq.trigger)
        stop = min([stop, *seq.engine_events])
        target = min(seq.num_tokens, stop)
        columns = self._cached_columns(seq, min(target - 1, log_from, seq.num_shareable))
        cached = len(columns) * self.layout.block_size
        length = self._chunk_length(cached, seq.num_tokens, stop, budget)
        if not length:
            return None
        self.pool.share(columns.ravel())  # what is hit must not be evicted to make room
        wanted = self._blocks_alone(target, log_from) - columns.size
        fits = wanted + self._expected_growth() <= self.blocks.headroom
        if fits and self.blocks.have_free(wanted):
            self._seat(seq, columns, target)
        self.pool.release(columns.ravel())
        if seq.status is SequenceStatus.RUNNING:
            return seq.row, length
        if not rows.num_rows:
            self._outgrow(seq)
        return None

    def _seat(self, seq: Sequence, columns: IntArray, target: int) -> None:
        """Give the first waiting sequence a row that begins with ``columns``, and its blocks."""
        rows = self.rows
        self.waiting.popleft()
        at = np.array([rows.add(seq)], np.int32)
        seq.num_cached_tokens = len(columns) * self.layout.block_size
        rows.run_start[at] = seq.trigger.start(rows.num_prompt[at])
        rows.num_identity[at] = seq.num_shareable
        rows.num_computed[at] = seq.num_cached_tokens
        rows.num_published[at] = len(columns)
        self.blocks.start_row(seq.row)
        self.blocks.adopt(seq.row, columns)
        self.events.expect(seq.policy_id, at)
        self.blocks.grow(at, target - rows.num_computed[at], rows.num_computed[at])
        self._admitted.append(seq)

    def _cached_columns(self, seq: Sequence, limit: int) -> IntArray:
        """Columns ``[n, LG, R]`` of the prefix cache that hold the sequence's first tokens.

        At most ``limit`` tokens: the rest has to be computed, for its logits or its queries.
        """
        size = self.layout.block_size
        seq.column_hashes = column_hashes(seq.token_ids, size, seq.column_hashes)
        return self.blocks.match(seq.column_hashes[: max(limit, 0) // size])

    def _publish_chunk(self, row: int, length: int) -> None:
        """Offer the prompt columns that a chunk completes to sequences admitted after it.

        They may read them in the same step: a layer stores all its new entries before it attends.
        """
        seq = self.rows.sequences[row]
        assert seq is not None
        end = int(self.rows.num_computed[row]) + length
        self._publish(seq, min(end, seq.num_prompt_tokens))

    def _publish(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the full columns among a row's first ``num_tokens`` that are still as computed."""
        rows, row, size = self.rows, seq.row, self.layout.block_size
        first = int(rows.num_published[row])
        end = min(num_tokens, int(rows.num_identity[row])) // size
        if end > first:
            tokens = rows.token_ids[row, : end * size]
            seq.column_hashes = column_hashes(tokens, size, seq.column_hashes[:end])
            self.blocks.publish(row, first, seq.column_hashes[first:end])
            rows.num_published[row] = end

    def _blocks_alone(self, num_tokens: int, log_from: int) -> int:
        """Blocks of a sequence that holds ``num_tokens`` and has logged from ``log_from`` on."""
        blocks = self.layout.blocks_for(num_tokens)
        if num_tokens > log_from:
            size = self.blocks.log_block_tokens
            blocks += (-(-num_tokens // size) - log_from // size) * self.layout.groups
        return blocks

    def _expected_growth(self) -> int:
        """Blocks the running sequences will want until their next event, end, or reserve."""
        rows, n = self.rows, self.rows.num_rows
        if not n:
            return 0
        computed = rows.num_computed[:n]
        horizon = np.minimum(rows.next_event[:n], rows.max_len[:n])
        growth = np.minimum(horizon, rows.num_tokens[:n] + self._reserve) - computed
        at = np.arange(n, dtype=np.int32)
        return self.blocks.wanted(at, growth, computed)

    def _outgrow(self, seq: Sequence) -> None:
        """End a sequence that the whole pool cannot hold any longer."""
        self.finish(seq, "length")
        self._outgrown.append(seq)


def _first_event(num_prompt: int, trigger: Trigger) -> tuple[int, int]:
    """Where a fresh sequence's first event is due, and from where it logs queries until then."""
    prompt, zero = np.array([num_prompt], np.int32), np.zeros(1, np.int32)
    state = RowState(prompt, zero, zero, trigger.start(prompt))
    next_event = trigger.next_event(state)
    return int(next_event[0]), int(trigger.log_from(state, next_event)[0])
