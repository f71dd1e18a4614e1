"""The last phase of a step: prefill chunks of running rows, and admission."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NO_CHUNKS, CompactionTask, NewRows, PrefillBatch
from kvserve.scheduler.step.admission import Admission
from kvserve.scheduler.step.departures import Departures
from kvserve.scheduler.step.parts import Parts

Chunk = tuple[int, int]
"""A row, and how many of its tokens a step computes."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """What a step computes beside its decoding rows."""

    admitted: NewRows
    prefill: PrefillBatch
    pruned: tuple[CompactionTask, ...]
    sampled: IntArray
    """Which chunks of ``prefill``, and then which of ``pruned``, get a token."""

    @property
    def rows(self) -> IntArray:
        """Rows of ``prefill``, then of ``pruned``."""
        return np.concatenate([self.prefill.rows, *(task.rows for task in self.pruned)])


class PrefillChunks:
    """Schedules prefill chunks: of running rows, oldest first, then of newly admitted ones."""

    def __init__(
        self, parts: Parts, admission: Admission, departures: Departures, max_tokens: int
    ) -> None:
        self._rows, self._blocks, self._events = parts.rows, parts.blocks, parts.events
        self._prefixes, self._waiting = parts.prefixes, parts.waiting
        self._admission = admission
        self._departures = departures
        self._max_tokens = max_tokens

    def catch_up(self, *, moves: bool) -> CaughtUp:
        """Schedule the chunks that the step has room for; ``moves``: the step does other work too.

        If the step would do nothing, the newest sequences are preempted until it does something:
        rows that catch up may hold the blocks that the others need. While an event is blocked on
        blocks, one preemption is enough: the next step carries out that event with its blocks.
        """
        rows, admission = self._rows, self._admission
        chunks = self._schedule()
        blocked_on_blocks = self._events.blocked_on_blocks and rows.num_rows > 1
        while rows.num_rows and not (moves or chunks or admission.has_new):
            self._departures.preempt()
            if blocked_on_blocks:
                break
            chunks = self._schedule()
        admitted = admission.take_new_rows()
        pruned = self._take_pruned(chunks)
        prefill = self._batch(chunks)
        at = np.concatenate([prefill.rows, *(task.rows for task in pruned)])
        complete = rows.num_computed[at] == rows.num_tokens[at]
        return CaughtUp(admitted, prefill, pruned, np.flatnonzero(complete))

    def _schedule(self) -> list[Chunk]:
        """Rows that catch up in this step, oldest first, and how many tokens of each."""
        rows = self._rows
        budget = self._max_tokens - rows.num_decoding
        chunks = []
        at = np.arange(rows.num_decoding, rows.num_rows)
        at = at[rows.caught_up[at] == 0]
        for row in at[np.lexsort((rows.arrival[at], rows.priority[at]))].tolist():
            length = self._reserve(row, budget)
            if length:
                chunks.append((row, length))
                budget -= length
        if not self._events.blocked_on_blocks:  # new rows would take the blocks it waits for
            chunks += self._admit(budget)
        return chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Admit waiting sequences in order while there is room; return their first chunks."""
        rows, chunks = self._rows, []
        while self._waiting and budget > 0 and rows.num_rows < rows.max_rows:
            seq = self._waiting.first
            if seq.awaits_token:
                break
            if not self._admission.admit(seq, budget):
                if not rows.num_rows:
                    self._departures.finish_pool_exhausted(seq)
                break
            self._waiting.remove(seq)
            if not rows.caught_up[seq.row]:
                length = self._reserve(seq.row, budget)
                if length:  # else an event comes first
                    chunks.append((seq.row, length))
                    budget -= length
        return chunks

    def _reserve(self, row: int, budget: int) -> int:
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
            if rows.owner(row).prunes_prompt and not rows.num_computed[row]:
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
