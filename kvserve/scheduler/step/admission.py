"""Admission: a waiting sequence gets a row and blocks, or comes back from host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NewRequest, NewRows
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.offload.conversations import Conversations, NextTurn
from kvserve.scheduler.step.parts import Parts
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.trigger import NO_EVENT, RowState, Trigger


@dataclass(slots=True)
class StepBudget:
    """``tokens`` that a step may still compute, ``chunked`` of them for prompts in chunks."""

    tokens: int
    chunked: int

    def spend(self, tokens: int) -> None:
        self.tokens -= tokens
        self.chunked -= tokens


class Admission:
    """Admits a sequence if it fits, with a reserve (``admission_reserve`` tokens) for the growth of
    each running sequence.

    A sequence whose next event or end comes first reserves fewer tokens. A smaller reserve admits
    more sequences and preempts more. Reserving a whole observation window would keep out the
    sequences that compression makes room for.
    """

    def __init__(self, parts: Parts, settings: SchedulerSettings) -> None:
        self._rows, self._blocks, self._events = parts.rows, parts.blocks, parts.events
        self._prefixes, self._swap = parts.prefixes, parts.swap
        self._conversations = parts.conversations
        self._reserve = settings.admission_reserve
        self._chunked = settings.chunked_prefill
        self._size = parts.blocks.layout.block_size
        self._admitted: list[Sequence] = []
        self._lacks_blocks: Sequence | None = None

    def blocks_at_least(self, num_prompt: int, max_len: int, trigger: Trigger) -> int:
        """The fewest blocks with which a sequence can get past its prompt and its first event."""
        due, log_from = first_event(num_prompt, trigger)
        tokens = num_prompt + 1 if due == NO_EVENT else min(due, max_len)
        return self._blocks.blocks_alone(tokens, log_from)

    def admit(self, seq: Sequence, budget: StepBudget) -> bool:
        """Give ``seq`` a row and its blocks, if there is room beside the running sequences.

        A new sequence gets all blocks up to its first event at once. If its prompt begins with a
        continuation, it resumes that one; if there is no room to resume, it waits as long as other
        sequences run.
        """
        parked = seq in self._swap
        if not parked and self._conversations is not None:
            found = self._conversations.find(seq)
            if found is not None:
                turn = self._conversations.plan(seq, found)
                if self._go_on(self._conversations, seq, turn, budget) or self._rows.num_rows:
                    return seq.status is SequenceStatus.RUNNING
            else:
                self._conversations.recall(seq)
        if parked:
            target, limit = 0, self._swap.identity_tokens(seq)
            wanted = self._swap.blocks_wanted(seq, self._reserve if self._rows.num_rows else 0)
        else:
            due, log_from = first_event(seq.first_prompt_tokens, seq.trigger)
            target = min(seq.num_tokens, seq.next_stop(seq.next_event(0, due)))
            # Not cached: the last token (we need its logits), and tokens whose queries are logged.
            limit = min(target - 1, log_from, seq.num_shareable)
            wanted = self._blocks.blocks_alone(target, log_from)
        columns = self._prefixes.cached(seq, limit)
        if not parked and not self.chunk_length(seq, columns.shape[0] * self._size, target, budget):
            return False
        pool = self._blocks.pool
        shared = columns[columns > 0]
        pool.share(shared)  # these cached columns must not be evicted to make room
        wanted -= len(shared)
        fits = wanted + self._expected_growth() <= self._blocks.headroom
        fits = fits and self._blocks.have_free(wanted)
        self._lacks_blocks = None if fits else seq
        if fits:
            if parked:
                self._swap.restore(seq, columns)
            else:
                self._start(seq, columns, target)
            self._admitted.append(seq)
        pool.release(shared)
        return seq.status is SequenceStatus.RUNNING

    def _go_on(
        self, conversations: Conversations, seq: Sequence, turn: NextTurn, budget: StepBudget
    ) -> bool:
        """Give ``seq`` a row that resumes a continuation as planned in ``turn``, if it fits."""
        computed = turn.resumption.num_tokens
        length = self.chunk_length(seq, computed, turn.at.target, budget)
        pinned, pool = turn.row.named, self._swap.pool if turn.hosted else self._blocks.pool
        pool.share(pinned)  # the continuation must not be evicted to make room
        fits = turn.blocks + self._expected_growth() <= self._blocks.headroom
        fits &= length > 0 or turn.at.target == computed  # an event comes first
        if fits and self._blocks.have_free(turn.blocks):
            at = np.array([conversations.resume_row(seq, turn)], np.int32)
            self._events.schedule_next_event(seq.policy_id, at)
            self._rows.next_event[at] = turn.due
            computed_at = self._rows.num_computed[at]
            self._blocks.grow(at, turn.at.target - computed_at, computed_at)
            self._admitted.append(seq)
        pool.release(pinned)
        return seq.status is SequenceStatus.RUNNING

    def chunk_length(self, seq: Sequence, computed: int, target: int, budget: StepBudget) -> int:
        """Tokens to compute in this step on the way to ``target``."""
        length = target - computed
        if self._chunked and not seq.prunes_from(computed):
            return max(min(length, budget.chunked), 0)
        return length if length <= budget.tokens else 0

    def take_lacking(self) -> Sequence | None:
        """The sequence that found too few blocks in the last step, if one did."""
        seq, self._lacks_blocks = self._lacks_blocks, None
        return seq

    @property
    def has_new(self) -> bool:
        """Whether sequences were admitted since the last ``take_new_rows``."""
        return bool(self._admitted)

    def take_new_rows(self) -> NewRows:
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
            known,
            self._rows.rounded_at[at],
        )

    def _start(self, seq: Sequence, columns: IntArray, target: int) -> None:
        """Give ``seq`` a row that begins with cached ``columns``, and blocks up to ``target``."""
        rows, blocks = self._rows, self._blocks
        if self._conversations is not None:
            self._conversations.count_miss(seq)
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
        return self._blocks.wanted(at, growth, computed)


def first_event(num_prompt: int, trigger: Trigger) -> tuple[int, int]:
    """Where a fresh sequence's first event is due, and from where it logs queries until then."""
    prompt, zero = np.array([num_prompt], np.int32), np.zeros(1, np.int32)
    state = RowState(prompt, zero, zero, trigger.start(prompt))
    next_event = trigger.next_event(state)
    return int(next_event[0]), int(trigger.log_from(state, next_event)[0])
