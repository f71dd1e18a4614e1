"""The messages between scheduler and runner. Their parts run in the order of their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.messages.sequence import Sequence

if TYPE_CHECKING:
    from kvserve.scheduler.messages.drafts import Drafts
    from kvserve.scheduler.messages.event import Events


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """Table entries that the runner has not seen: flat indices into its tables, and blocks."""

    indices: IntArray
    blocks: IntArray


_NO_BLOCKS: IntArray = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class RowMove:
    """What leaves the pool for host memory, or comes back.

    Contents move between ``device_blocks`` and ``host_blocks``, pair by pair. What a row has beside
    blocks moves if its number after all row swaps is given as ``row``: its policy's scores, which
    ``place`` identifies, or its remainder, to or from a place behind the last row.
    """

    device_blocks: IntArray = field(default_factory=lambda: _NO_BLOCKS)
    host_blocks: IntArray = field(default_factory=lambda: _NO_BLOCKS)
    row: int = NO_PLACE
    place: int = NO_PLACE
    remainder: int = NO_PLACE


@dataclass(frozen=True, slots=True)
class RowMoves:
    """What moves for rows that leave, come back, or resume others: first all ``outs``, then blocks
    of the pool are copied, which may have come free since, then all ``ins``."""

    discarded: tuple[int, ...] = ()
    """Places of rows in host memory that will not come back."""
    outs: tuple[RowMove, ...] = ()
    copy_from: IntArray = field(default_factory=lambda: _NO_BLOCKS)
    copy_to: IntArray = field(default_factory=lambda: _NO_BLOCKS)
    ins: tuple[RowMove, ...] = ()


@dataclass(frozen=True, slots=True)
class ScheduledEvents:
    """A step's events: those that are carried out, and those that are scored for a later step,
    whose rows are skipped in this one."""

    compactions: tuple[Events, ...] = ()
    observations: tuple[Events, ...] = ()


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
    ``log_from [n]`` on, the last of every ``log_stride [n]``, for windows that begin ``log_span
    [n]`` tokens apart; prompts have ``prompt_lens [n]`` tokens; ``last_token [n]`` is the newest
    known one. Entries before ``rounded_at [n]`` are not read as they were computed.
    """

    requests: tuple[NewRequest, ...]
    prompt_lens: IntArray
    num_computed: IntArray
    kv_lens: IntArray
    log_from: IntArray
    log_span: IntArray
    log_stride: IntArray
    last_token: IntArray
    rounded_at: IntArray


NO_ROWS = NewRows((), *(np.zeros(0, np.int32) for _ in range(8)))


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

    events: ScheduledEvents
    row_swaps: tuple[tuple[int, int], ...]
    moves: RowMoves | None
    admitted: NewRows
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
    pruned: tuple[Events, ...]
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
