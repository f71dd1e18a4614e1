"""The last phase of a step: prefill chunks of running rows, and admission of waiting sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NO_CHUNKS, NO_ROWS, NewRequest, NewRows, PrefillBatch
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.step.departures import Departures
from kvserve.scheduler.step.settings import Parts, SchedulerSettings
from kvserve.scheduler.triggers.trigger import RowState, Trigger

if TYPE_CHECKING:
    from kvserve.scheduler.messages.event import Events
    from kvserve.scheduler.step.continued_rows import ContinuedRows, NextTurn


@dataclass(slots=True)
class StepBudget:
    """``tokens`` that a step may still compute, ``chunked`` of them for prompts in chunks."""

    tokens: int
    chunked: int

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens
        self.chunked -= tokens


Chunk = tuple[int, int]
"""A row, and how many of its tokens a step computes."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What a step computes beside its decoding rows."""

    admitted: NewRows
    prefill: PrefillBatch
    pruned: tuple[Events, ...]
    rows: IntArray
    """Of ``prefill``, then of ``pruned``."""
    sampled: IntArray
    """Which of these get a token."""


NOTHING = CaughtUp(NO_ROWS, NO_CHUNKS, (), NO_CHUNKS.rows, NO_CHUNKS.rows)


class Admission:
    """Schedules prefill chunks: of running rows, oldest first, then of newly admitted ones.

    If it is the turn of a client that has no row which catches up, its sequence gets up to half of
    the step before all others: it does not wait for the long prompts of other clients.

    A sequence is admitted if it fits, with a reserve (``admission_reserve`` tokens) for the growth
    of each running sequence. A sequence whose next event or end comes first reserves fewer tokens.
    A smaller reserve admits more sequences and preempts more. Reserving a whole observation window
    would keep out the sequences that compression makes room for.
    """

    def __init__(self, parts: Parts, departures: Departures, settings: SchedulerSettings) -> None:
        self._rows, self._blocks, self._events = parts.rows, parts.blocks, parts.events
        self._waiting, self._saved, self._departures = parts.waiting, parts.saved, departures
        self._max_tokens = settings.max_num_batched_tokens
        self._max_prefill = settings.max_prefill_tokens or settings.max_num_batched_tokens
        self._reserve = settings.admission_reserve
        self._chunked = settings.chunked_prefill
        self._size = parts.blocks.layout.block_size
        self._admitted: list[Sequence] = []
        """Sequences that the step gives rows to."""
        self.lacks_blocks: Sequence | None = None
        """The one that found too few blocks in the last step, if one did."""

    def catch_up(self, decoded: int, *, moves: bool) -> CaughtUp:
        """Schedule the chunks that the step has room for beside ``decoded`` tokens; ``moves``: the
        step does other work too.

        If the step would do nothing, the newest sequences are preempted until it does something:
        rows that catch up may hold the blocks that the others need. While an event is blocked on
        blocks, one preemption is enough: the next step carries out that event with its blocks.
        """
        rows = self._rows
        chunks = self._schedule(decoded)
        blocked_on_blocks = self._events.blocked_on_blocks and rows.num_rows > 1
        while rows.num_rows and not (moves or chunks or self._admitted):
            self._departures.preempt()
            if blocked_on_blocks:
                break
            chunks = self._schedule(rows.num_decoding)
        if not (chunks or self._admitted):
            return NOTHING  # most steps
        admitted = self._take_new_rows()
        pruned = self._take_pruned(chunks)
        prefill = self._batch(chunks)
        at = np.concatenate([prefill.rows, *(task.rows for task in pruned)])
        complete = rows.num_computed[at] == rows.num_tokens[at]
        return CaughtUp(admitted, prefill, pruned, at, np.flatnonzero(complete))

    def _schedule(self, decoded: int) -> list[Chunk]:
        """Rows that catch up in this step, oldest first, and how many tokens of each."""
        rows = self._rows
        tokens = self._max_tokens - decoded
        budget = StepBudget(tokens, min(tokens, self._max_prefill) if decoded else tokens)
        at = np.arange(rows.num_decoding, rows.num_rows)
        at = at[rows.caught_up[at] == 0]
        behind = at[np.lexsort((rows.arrival[at], rows.priority[at]))].tolist()
        # New rows would take the blocks that an event waits for.
        admits = not self._events.blocked_on_blocks
        chunks, first = list[Chunk](), self._waiting.first
        if (
            admits
            and behind
            and first is not None
            and first.client not in {rows.owner(row).client for row in behind}
        ):
            half = StepBudget(budget.tokens, budget.chunked // 2)
            self._admit(chunks, half, most=1)
            budget.spend(budget.tokens - half.tokens)
        for row in behind:
            self._add_chunk(chunks, row, budget)
        if admits:
            self._admit(chunks, budget)
        return chunks

    def _admit(self, chunks: list[Chunk], budget: StepBudget, most: int | None = None) -> None:
        """Admit waiting sequences in order while there is room, and add their first chunks."""
        rows, last = self._rows, self._rows.max_rows
        if most is not None:
            last = min(last, rows.num_rows + most)
        while budget.chunked > 0 and rows.num_rows < last:
            seq = self._waiting.first
            if seq is None or seq.awaits_token:
                break
            if not self.admit(seq, budget):
                if not rows.num_rows:
                    self._departures.finish_pool_exhausted(seq)
                break
            row = seq.row
            self._waiting.admit(seq, int(rows.num_tokens[row] - rows.num_computed[row]))
            if not rows.caught_up[row]:
                self._add_chunk(chunks, row, budget)

    def _add_chunk(self, chunks: list[Chunk], row: int, budget: StepBudget) -> None:
        """Add a row's next chunk and reserve its blocks; none if it has to wait, as for an event.
        It ends where an event is due."""
        rows, at = self._rows, np.array([row], np.int32)
        target = min(int(rows.num_tokens[row]), int(rows.next_event[row]))
        length = self._chunk_length(rows.owner(row), int(rows.num_computed[row]), target, budget)
        new = np.array([length], np.int32)
        if not length or not self._blocks.have_free(
            self._blocks.missing_blocks(at, new, rows.num_computed[at])
        ):
            return
        self._blocks.grow(at, new, rows.num_computed[at])
        # Sequences admitted after it find its columns, and may read them in the same step: a layer
        # stores all its new entries before it attends.
        seq, end = rows.owner(row), int(rows.num_computed[row]) + length
        rows.publish(seq, min(end, seq.num_prompt_tokens))
        chunks.append((row, length))
        budget.spend(length)

    def _take_pruned(self, chunks: list[Chunk]) -> tuple[Events, ...]:
        """Remove prompts that are pruned as they are computed from ``chunks``; return tasks."""
        rows, tasks = self._rows, []
        for chunk in chunks.copy():
            row, length = chunk
            if rows.owner(row).prunes_from(int(rows.num_computed[row])):
                chunks.remove(chunk)
                self._blocks.advance(np.array([row]), np.array([length]))
                rows.num_computed[row] = length
                tasks.append(self._events.prune(row))
        return tuple(tasks)

    def _batch(self, chunks: list[Chunk]) -> PrefillBatch:
        if not chunks:
            return NO_CHUNKS
        at = np.array([row for row, _ in chunks], np.int32)
        lengths = np.array([length for _, length in chunks], np.int32)
        starts = self._rows.num_computed[at]
        self._blocks.advance(at, lengths)
        self._rows.num_computed[at] += lengths
        tokens = [
            self._rows.token_ids[row, start : start + length]
            for row, start, length in zip(at, starts, lengths, strict=True)
        ]
        return PrefillBatch(at, starts, lengths, np.concatenate(tokens))

    def admit(self, seq: Sequence, budget: StepBudget) -> bool:
        """Give ``seq`` a row and its blocks, if there is room beside the running sequences.

        A new sequence gets all blocks up to its first event at once. If its prompt begins with a
        continuation, it resumes that one; if there is no room to resume, it waits as long as other
        sequences run.
        """
        parked = seq in self._saved
        if not parked and (found := self._saved.find(seq)) is not None:
            turn = self._continued.plan(seq, found)
            if self._go_on(seq, turn, budget) or self._rows.num_rows:
                return seq.status is SequenceStatus.RUNNING
        if parked:
            target, limit = 0, self._saved.identity_tokens(seq)
            wanted = self._saved.blocks_wanted(seq, self._reserve if self._rows.num_rows else 0)
        else:
            due, log_from = first_event(seq.num_prompt_tokens, seq.trigger)
            target = min(seq.num_tokens, seq.next_event(0, due))
            # Not cached: the last token (we need its logits), and tokens whose queries are logged.
            limit = min(target - 1, log_from, seq.num_shareable)
            wanted = self._blocks.blocks_alone(target, log_from, seq.trigger.log_stride)
        columns = self._match(seq, limit)
        if parked:
            columns = self._saved.cached_blocks(columns)
        elif not self._chunk_length(seq, len(columns) * self._size, target, budget):
            return False
        pool = self._blocks.pool
        shared = columns[columns > 0]
        pool.share(shared)  # these cached columns must not be evicted to make room
        wanted -= len(shared)
        fits = wanted + self._expected_growth() <= self._blocks.headroom
        fits = fits and self._blocks.have_free(wanted)
        self.lacks_blocks = None if fits else seq
        if fits:
            if parked:
                self._saved.restore(seq, columns)
            else:
                self._start(seq, columns, target)
            self._admitted.append(seq)
        pool.release(shared)
        return seq.status is SequenceStatus.RUNNING

    def _match(self, seq: Sequence, limit: int) -> IntArray:
        """Cached columns ``[n, .]`` of at most ``limit`` tokens that ``seq`` can begin with."""
        hashes = self._rows.hashes(seq, seq.token_ids, seq.column_hashes)
        return self._blocks.match(hashes[: max(limit, 0) // self._size])

    def _go_on(self, seq: Sequence, turn: NextTurn, budget: StepBudget) -> bool:
        """Give ``seq`` a row that resumes a continuation as planned in ``turn``, if it fits."""
        computed = turn.at.computed
        length = self._chunk_length(seq, computed, turn.at.target, budget)
        pinned = turn.row.block_ids
        pool = self._saved.host_pool if turn.hosted else self._blocks.pool
        pool.share(pinned)  # what is resumed stays where it is, if it is evicted to make room
        self._blocks.continuations.host.pinned = turn.row.remainder
        fits = turn.blocks + self._expected_growth() <= self._blocks.headroom
        fits &= length > 0 or turn.at.target == computed  # an event comes first
        if fits and self._blocks.have_free(turn.blocks):
            at = np.array([self._continued.resume_row(seq, turn)], np.int32)
            self._events.schedule_next_event(seq.policy_id, at)
            self._rows.next_event[at] = turn.due
            computed_at = self._rows.num_computed[at]
            self._blocks.grow(at, turn.at.target - computed_at, computed_at)
            self._admitted.append(seq)
        pool.release(pinned)
        self._blocks.continuations.host.pinned = NO_PLACE
        return seq.status is SequenceStatus.RUNNING

    @property
    def _continued(self) -> ContinuedRows:
        """The saved rows, where a continuation was found."""
        return cast("ContinuedRows", self._saved)

    def _chunk_length(self, seq: Sequence, computed: int, target: int, budget: StepBudget) -> int:
        """Tokens to compute in this step on the way to ``target``."""
        length = target - computed
        if self._chunked and not seq.prunes_from(computed):
            return max(min(length, budget.chunked), 0)
        return length if length <= budget.tokens else 0

    def _take_new_rows(self) -> NewRows:
        """The rows of sequences admitted since the last call, before they compute anything."""
        new, self._admitted = self._admitted, []
        at = [seq.row for seq in new]
        known = np.array([seq.token_ids[-1] for seq in new], np.int32)
        return NewRows(
            tuple(map(NewRequest.of, new)),
            self._rows.num_prompt[at],
            self._rows.num_computed[at],
            self._blocks.kv_lens[:, at],
            self._blocks.queries.logged_from(at),
            np.array([seq.trigger.log_span for seq in new], np.int64),
            np.array([seq.trigger.log_stride for seq in new], np.int64),
            known,
            self._rows.rounded_at[at],
        )

    def _start(self, seq: Sequence, columns: IntArray, target: int) -> None:
        """Give ``seq`` a row that begins with cached ``columns``, and blocks up to ``target``."""
        rows, blocks = self._rows, self._blocks
        self._saved.count_miss(seq)
        at = np.array([rows.add(seq)], np.int32)
        seq.num_cached_tokens = len(columns) * self._size
        rows.first_uncompressed_pos[at] = seq.trigger.start(rows.num_prompt[at])
        rows.num_unmodified_tokens[at] = seq.num_shareable
        rows.num_computed[at] = seq.num_cached_tokens
        rows.num_published[at] = len(columns)
        blocks.start_row(seq.row)
        blocks.adopt(seq.row, columns)
        self._events.schedule_next_event(seq.policy_id, at)
        blocks.grow(at, target - rows.num_computed[at], rows.num_computed[at])

    def _expected_growth(self) -> int:
        """Blocks that running sequences need for the reserve, or up to an earlier event or end."""
        rows, n = self._rows, self._rows.num_rows
        if not n:
            return 0
        computed = rows.num_computed[:n]
        horizon = np.minimum(rows.next_event[:n], rows.max_len[:n])
        growth = np.minimum(horizon, rows.num_tokens[:n] + self._reserve) - computed
        at = np.arange(n, dtype=np.int32)
        return self._blocks.missing_blocks(at, growth, computed)


def first_event(num_prompt: int, trigger: Trigger) -> tuple[int, int]:
    """Where a fresh sequence's first event is due, and from where it logs queries until then."""
    uncompressed = int(trigger.start(np.array([num_prompt], np.int32))[0])
    state = RowState.of(num_prompt, 0, 0, uncompressed)
    next_event = trigger.next_event(state)
    return int(next_event[0]), int(trigger.log_from(state, next_event)[0])
