"""Chunks of sequences that catch up: their blocks, and what is told of them."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.admission import Admission
from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.events import EventBook
from kvserve.scheduler.output import NO_CHUNKS, CompactionTask, PrefillBatch
from kvserve.scheduler.prefixes import Prefixes
from kvserve.scheduler.rows import RowTable


class Chunks:
    """A chunk is a row and how many of its tokens a step computes."""

    def __init__(
        self,
        rows: RowTable,
        blocks: BlockManager,
        events: EventBook,
        prefixes: Prefixes,
        admission: Admission,
    ) -> None:
        self._rows = rows
        self._blocks = blocks
        self._events = events
        self._prefixes = prefixes
        self._admission = admission

    def reserve(self, row: int, budget: int) -> int:
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

    def take_pruned(self, chunks: list[tuple[int, int]]) -> tuple[CompactionTask, ...]:
        """Take whole prompts that are pruned while they are computed out of ``chunks``."""
        rows, tasks = self._rows, []
        for chunk in chunks.copy():
            row, length = chunk
            if rows.owner(row).prunes_prompt and not rows.num_computed[row]:
                chunks.remove(chunk)
                self._blocks.advance(np.array([row]), np.array([length]))
                rows.num_computed[row] = length
                tasks.append(self._events.prune(row))
        return tuple(tasks)

    def batch(self, chunks: list[tuple[int, int]]) -> PrefillBatch:
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
