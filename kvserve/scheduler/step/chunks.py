"""The last phase of a step: prefill chunks of running rows, and admission."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import (
    NO_CHUNKS,
    NO_ROWS,
    CompactionTask,
    NewRows,
    PrefillBatch,
)
from kvserve.scheduler.step.admission import Admission, StepBudget
from kvserve.scheduler.step.departures import Departures
from kvserve.scheduler.step.parts import Parts
from kvserve.scheduler.step.settings import SchedulerSettings

Chunk = tuple[int, int]
"""A row, and how many of its tokens a step computes."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What a step computes beside its decoding rows."""

    admitted: NewRows
    prefill: PrefillBatch
    pruned: tuple[CompactionTask, ...]
    rows: IntArray
    """Of ``prefill``, then of ``pruned``."""
    sampled: IntArray
    """Which of these get a token."""


NOTHING = CaughtUp(NO_ROWS, NO_CHUNKS, (), NO_CHUNKS.rows, NO_CHUNKS.rows)


class PrefillChunks:
    """Schedules prefill chunks: of running rows, oldest first, then of newly admitted ones.

    If it is the turn of a client that has no row which catches up, its sequence gets up to half of
    the step before all others: it does not wait for the long prompts of other clients.
    """

    def __init__(
        self,
        parts: Parts,
        admission: Admission,
        departures: Departures,
        settings: SchedulerSettings,
    ) -> None:
        self._rows, self._blocks, self._events = parts.rows, parts.blocks, parts.events
        self._prefixes, self._waiting = parts.prefixes, parts.waiting
        self._admission = admission
        self._departures = departures
        self._max_tokens = settings.max_num_batched_tokens
        self._max_prefill = settings.max_prefill_tokens or settings.max_num_batched_tokens

    def catch_up(self, decoded: int, *, moves: bool) -> CaughtUp:
        """Schedule the chunks that the step has room for beside ``decoded`` tokens; ``moves``: the
        step does other work too.

        If the step would do nothing, the newest sequences are preempted until it does something:
        rows that catch up may hold the blocks that the others need. While an event is blocked on
        blocks, one preemption is enough: the next step carries out that event with its blocks.
        """
        rows, admission = self._rows, self._admission
        chunks = self._schedule(decoded)
        blocked_on_blocks = self._events.blocked_on_blocks and rows.num_rows > 1
        while rows.num_rows and not (moves or chunks or admission.admitted):
            self._departures.preempt()
            if blocked_on_blocks:
                break
            chunks = self._schedule(rows.num_decoding)
        if not (chunks or admission.admitted):
            return NOTHING  # most steps
        admitted = admission.take_new_rows()
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
        chunks = self._admit_before(behind, budget) if admits and behind else []
        for row in behind:
            self._add_chunk(chunks, row, budget)
        if admits:
            self._admit(chunks, budget)
        return chunks

    def _admit_before(self, behind: list[int], budget: StepBudget) -> list[Chunk]:
        """Admit the next sequence if its client has no row of ``behind``; return its chunk."""
        chunks: list[Chunk] = []
        seq = self._waiting.first
        if seq is not None and all(self._rows.owner(row).client != seq.client for row in behind):
            half = StepBudget(budget.tokens, budget.chunked // 2)
            self._admit(chunks, half, most=1)
            budget.spend(budget.tokens - half.tokens)
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
            if not self._admission.admit(seq, budget):
                if not rows.num_rows:
                    self._departures.finish_pool_exhausted(seq)
                break
            row = seq.row
            self._waiting.admit(seq, int(rows.num_tokens[row] - rows.num_computed[row]))
            if not rows.caught_up[row]:
                self._add_chunk(chunks, row, budget)

    def _add_chunk(self, chunks: list[Chunk], row: int, budget: StepBudget) -> None:
        """Add a row's next chunk; none if it has to wait, as for an event."""
        length = self._reserve(row, budget)
        if length:
            chunks.append((row, length))
            budget.spend(length)

    def _reserve(self, row: int, budget: StepBudget) -> int:
        """Reserve the blocks of a row's next chunk; returns its length, 0 if it has to wait.

        A chunk ends where an event is due.
        """
        rows, at = self._rows, np.array([row], np.int32)
        target = min(int(rows.num_tokens[row]), int(rows.next_event[row]))
        length = self._admission.chunk_length(
            rows.owner(row), int(rows.num_computed[row]), target, budget
        )
        new = np.array([length], np.int32)
        if not length or not self._blocks.have_free(
            self._blocks.wanted(at, new, rows.num_computed[at])
        ):
            return 0
        self._blocks.grow(at, new, rows.num_computed[at])
        self._prefixes.publish_chunk(row, length)
        return length

    def _take_pruned(self, chunks: list[Chunk]) -> tuple[CompactionTask, ...]:
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
        self._blocks.grow(at, lengths, starts)
        self._blocks.advance(at, lengths)
        self._rows.num_computed[at] += lengths
        tokens = [
            self._rows.token_ids[row, start : start + length]
            for row, start, length in zip(at, starts, lengths, strict=True)
        ]
        return PrefillBatch(at, starts, lengths, np.concatenate(tokens))
