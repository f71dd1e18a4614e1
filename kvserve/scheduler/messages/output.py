"""The messages between scheduler and runner. Their parts run in the order of their fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.drafts import Drafts
from kvserve.scheduler.messages.event import EventKind
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.triggers.trigger import EvictionSpec


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Table entries that the runner has not seen: flat indices into its tables, and blocks."""

    indices: IntArray
    blocks: IntArray


@dataclass(frozen=True, slots=True)
class ObservationTask:
    """E events of one policy and one ``kind``, to be scored. Arrays are ``[E]``, except for
    ``old_lens [LG, E, R]``.

    ``rows`` are numbers before ``SchedulerOutput.row_swaps``; ``plan`` says what is taken of the
    rows, ``old_lens`` what they hold. If queries are recomputed, ``token_ids [E, T]`` are the
    tokens from ``plan.query_start`` on, padded at the end.
    """

    policy_id: int
    rows: IntArray
    seq_ids: IntArray
    plan: EvictionSpec
    old_lens: IntArray
    token_ids: IntArray | None
    kind: EventKind = field(default=EventKind.EVEN, kw_only=True)

    def part(self, at: IntArray) -> ObservationTask:
        """The events ``at`` alone."""
        return replace(self, **self._of(at))

    def _of(self, at: IntArray) -> dict[str, Any]:
        """The fields with one item per event, for the events ``at``."""
        return {
            "rows": self.rows[at],
            "seq_ids": self.seq_ids[at],
            "plan": self.plan.part(at),
            "old_lens": self.old_lens[:, at],
            "token_ids": None if self.token_ids is None else self.token_ids[at],
        }


@dataclass(frozen=True, slots=True)
class CodeBlocks:
    """Where E events write codes, and what rows hold before and after; ``[LG, E, R]``.

    ``index_blocks`` and ``vector_blocks`` ``[LG, E, R, .]`` are those of each lane from its first
    column on.
    """

    coded_before: IntArray
    coded: IntArray
    vectors_before: IntArray
    num_vectors: IntArray
    index_blocks: IntArray
    vector_blocks: IntArray

    def part(self, at: IntArray) -> CodeBlocks:
        """The events ``at`` alone."""
        return CodeBlocks(*(getattr(self, name)[:, at] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class CompactionTask(ObservationTask):
    """E events to be carried out: rows of ``old_lens`` become rows of ``new_lens [LG, E, R]``.

    Entries from ``copy_start[e]`` on are written again: ``dst_blocks[lg, e, r, j]`` is the block of
    column ``copy_start[e] // B + j`` afterwards. Then queries are logged from ``log_from[e]`` on.
    Events that an earlier step has scored (``SchedulerOutput.observations``) are not scored again.
    Those of kind ``CODED`` write ``codes``, and raw entries if a row is written afresh. ``early``
    events were not due, but blocks ran out.
    """

    new_lens: IntArray
    copy_start: IntArray
    dst_blocks: IntArray
    log_from: IntArray
    codes: CodeBlocks | None = None
    early: bool = False

    @property
    def compacts(self) -> IntArray:
        """Which events evict entries, or turn some into codes: bool [E]."""
        changed = (self.new_lens != self.old_lens).any(axis=(0, 2))
        if self.codes is not None:
            changed |= (self.codes.coded != self.codes.coded_before).any(axis=(0, 2))
        return np.asarray(changed)

    @property
    def rounds(self) -> IntArray:
        """Behind which events no older entry is read as it was computed: bool [E]. Those that evict
        nothing change nothing; a pruned prompt was never stored so."""
        return np.asarray(self.compacts | (self.kind is EventKind.PRUNED))

    @classmethod
    def of(
        cls,
        events: ObservationTask,
        new_lens: IntArray,
        copy_start: IntArray,
        dst_blocks: IntArray,
        log_from: IntArray,
        codes: CodeBlocks | None = None,
    ) -> CompactionTask:
        """Carry out ``events``."""
        known = {item.name: getattr(events, item.name) for item in fields(events)}
        return cls(
            **known,
            new_lens=new_lens,
            copy_start=copy_start,
            dst_blocks=dst_blocks,
            log_from=log_from,
            codes=codes,
        )

    def part(self, at: IntArray) -> CompactionTask:
        """The events ``at`` alone."""
        return replace(
            self,
            **self._of(at),
            new_lens=self.new_lens[:, at],
            copy_start=self.copy_start[at],
            dst_blocks=self.dst_blocks[:, at],
            log_from=self.log_from[at],
            codes=None if self.codes is None else self.codes.part(at),
        )


NO_PLACE = -1
"""The row and the place of a swap task that moves blocks alone."""


@dataclass(frozen=True, slots=True)
class SwapTask:
    """A row that leaves for host memory, or comes back.

    ``row`` is its number after all row swaps; ``place`` identifies what it keeps beside its blocks;
    contents move between ``device_blocks`` and ``host_blocks``, pair by pair.
    """

    row: int
    place: int
    device_blocks: IntArray
    host_blocks: IntArray


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Contents of the blocks ``sources [n]`` go to ``copies [n]``, pair by pair."""

    sources: IntArray
    copies: IntArray


@dataclass(frozen=True, slots=True)
class RemainderMoves:
    """Remainders of ``source [n]`` go to ``to [n]``, all at once: rows, after all row swaps, and
    places behind the last row."""

    source: IntArray
    to: IntArray


@dataclass(frozen=True, slots=True)
class BegunTurns:
    """Recomputed rows that have reached the start of a later turn of their conversation: queries
    are logged from ``log_from [n]`` on. ``rows [n]`` are numbers before all else in the step."""

    rows: IntArray
    log_from: IntArray


NO_TURNS = BegunTurns(np.zeros(0, np.int32), np.zeros(0, np.int32))
NO_MOVES = RemainderMoves(np.zeros(0, np.int32), np.zeros(0, np.int32))
NO_COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the runner has to know about a sequence that was given ``row``; sent once.

    ``token_ids`` are all known ones: the prompt, and those generated before a preemption.
    ``sampling`` is passed on unread.
    """

    seq_id: int
    row: int
    num_prompt_tokens: int
    token_ids: IntArray
    stop_token_ids: tuple[int, ...]
    sampling: Any

    @classmethod
    def of(cls, seq: Sequence) -> NewRequest:
        """Those of its fields."""
        return cls(*(getattr(seq, name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows given to n sequences: what they hold before this step's forward.

    ``kv_lens [LG, n, R]`` entries, of ``num_computed [n]`` tokens; queries are logged from
    ``log_from [n]`` on, for windows that begin ``log_span [n]`` tokens apart; prompts have
    ``prompt_lens [n]`` tokens; ``last_token [n]`` is the newest known one. Entries before
    ``rounded_at [n]`` are not read as they were computed.
    """

    requests: tuple[NewRequest, ...]
    prompt_lens: IntArray
    num_computed: IntArray
    kv_lens: IntArray
    log_from: IntArray
    log_span: IntArray
    last_token: IntArray
    rounded_at: IntArray


NO_ROWS = NewRows((), *(np.zeros(0, np.int32) for _ in range(7)))


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Chunks of sequences that catch up: rows, first logical positions, lengths and token ids."""

    rows: IntArray
    starts: IntArray
    lengths: IntArray
    token_ids: IntArray


NO_CHUNKS = PrefillBatch(*(np.zeros(0, np.int32) for _ in range(4)))


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. Decoding rows are ``[0, num_decoding)``, one token each, from ``last_token``; if
    there are ``drafts``, these have their tokens."""

    turns: BegunTurns
    compactions: tuple[CompactionTask, ...]
    observations: tuple[ObservationTask, ...]
    """Events that a later step needs the counts of; their rows are skipped in this one."""
    row_swaps: tuple[tuple[int, int], ...]
    discarded: tuple[int, ...]
    """Places of rows in host memory that will not come back."""
    swap_outs: tuple[SwapTask, ...]
    copies: BlockCopies
    """For rows that resume continuations. After ``swap_outs`` and before ``swap_ins``, since the
    source of a copy may have come free since."""
    swap_ins: tuple[SwapTask, ...]
    remainder_saves: RemainderMoves
    """Of rows that leave, to their places."""
    admitted: NewRows
    remainder_loads: RemainderMoves
    """Of rows that come back, from their places."""
    table_updates: tuple[TableUpdate, ...]
    """Of each table of each cache group, in the order of the groups."""
    num_decoding: int
    drafts: Drafts | None
    """Guesses that this step verifies. Each of a chunk's tokens is sampled from."""
    prefill: PrefillBatch
    columns: IntArray
    """Blocks in use by each scheduled row (the longest of its groups), in the batch's order."""
    token_columns: IntArray
    """The same if every token were held: columns of what is addressed by logical position."""
    logs_queries: bool
    pruned: tuple[CompactionTask, ...]
    """Prompts that are computed whole and pruned to ``new_lens``; a task each, with row numbers
    after all row swaps."""
    sampled_chunks: IntArray
    """Which chunks of ``prefill``, and then which of ``pruned``, are sampled from."""
    sampled: tuple[Sequence, ...]
    """Sequences that get a token, or with ``drafts`` at least one: decoding rows in order, then
    sampled chunks in order. Only the engine's core reads them: the scheduler goes on changing them
    while the runner works."""
    sampled_at: IntArray
    """Logical positions of those tokens, the first of each sequence."""

    @property
    def num_decoding_tokens(self) -> int:
        """Tokens that the decoding rows compute."""
        return self.num_decoding if self.drafts is None else len(self.drafts.token_ids)

    @property
    def sampled_rows(self) -> IntArray:
        """The rows of ``sampled``; those with drafts once for each token of their chunks."""
        decoding = np.arange(self.num_decoding, dtype=np.int32)
        if self.drafts is not None:
            decoding = np.repeat(decoding, self.drafts.lengths)
        chunks = np.concatenate([self.prefill.rows, *(task.rows for task in self.pruned)])
        return np.concatenate([decoding, chunks[self.sampled_chunks]])

    @property
    def num_tokens(self) -> int:
        pruned = sum(int(task.old_lens.max()) for task in self.pruned)
        return self.num_decoding_tokens + len(self.prefill.token_ids) + pruned
