"""Counters and tokens of the running sequences; each array has a place for every row."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.column_hash import column_hashes
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.row_schema import RowArrays, per_row
from kvserve.scheduler.triggers.trigger import RowState

_OF_THIS_RUN = {"next_event", "caught_up", "peak_blocks", "num_unknown"}
"""Fields that a resumed row does not take over from the saved one."""
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class RowTable(RowArrays):
    """Rows ``[0, num_decoding)`` decode, those up to ``num_rows`` catch up with their tokens."""

    num_prompt: IntArray = per_row("num_prompt_tokens")
    """Prompt length for triggers: of a conversation's first prompt, or up to its last one's end."""
    num_tokens: IntArray = per_row("num_tokens")
    """Known tokens, and those being sampled."""
    num_computed: IntArray = per_row()
    """The logical length of the cache."""
    max_len: IntArray = per_row("max_len")
    first_uncompressed_pos: IntArray = per_row()
    """The logical position of the oldest token that no event has taken."""
    next_event: IntArray = per_row()
    guess_from: IntArray = per_row("guesses.start")
    """From how many tokens on its drafter is asked."""
    caught_up: IntArray = per_row()
    """1 once the row's next token comes from the sampler."""
    replay_until: IntArray = per_row("replay_until")
    priority: IntArray = per_row("priority")
    arrival: IntArray = per_row("arrival")
    policy_id: IntArray = per_row("policy_id")
    num_events: IntArray = per_row()
    compactions: IntArray = per_row()
    rounded_at: IntArray = per_row()
    """From which token on entries may be read as they were computed."""
    leaves_remainder: IntArray = per_row("leaves_remainder")
    """Whether something stands for what its events drop."""
    blocks_released: IntArray = per_row()
    peak_blocks: IntArray = per_row()
    num_unmodified_tokens: IntArray = per_row()
    """Upper bound of the leading entries that no event has changed."""
    num_published: IntArray = per_row()
    """Columns that the prefix cache has seen."""
    num_unknown: IntArray = per_row()
    """How many of the last tokens the host does not know yet."""

    def __init__(self, max_rows: int, max_model_len: int, blocks: BlockManager) -> None:
        self.max_rows = max_rows
        self._blocks = blocks
        self._swaps: list[tuple[int, int]] = []
        self.num_rows = 0
        self.num_decoding = 0
        self.sequences: list[Sequence | None] = [None] * max_rows
        self.token_ids: IntArray = np.zeros((max_rows, max_model_len + 1), np.int32)
        self.stop_ids: IntArray = np.full((max_rows, 4), -1, np.int32)
        self.make_by_row(lambda fields: np.zeros((fields, max_rows), np.int32))

    def state(self, at: IntArray) -> RowState:
        """What triggers may know of the rows ``at``."""
        layout = self._blocks.layout
        entries = self._blocks.kv_lens[:, at].sum(axis=(0, 2), dtype=np.int32)
        return RowState(
            self.num_prompt[at],
            self.num_computed[at],
            -(-entries // layout.groups),
            self.first_uncompressed_pos[at],
            layout.block_size,
        )

    def has_remainder(self, row: int) -> bool:
        """Whether something stands for what a row has lost."""
        return bool(self.leaves_remainder[row] and self.compactions[row])

    def live(self) -> list[Sequence]:
        """The sequences of the rows in use, in row order."""
        return [seq for seq in self.sequences[: self.num_rows] if seq is not None]

    def add(self, seq: Sequence) -> int:
        """Give ``seq`` the next row, as one that has computed nothing."""
        row = self._next_row(seq)
        self.begin_rows(row, seq, int)
        return row

    def restore(self, seq: Sequence, counters: dict[str, IntArray]) -> int:
        """Give ``seq`` the next row, with the ``counters`` it had when it left one."""
        row = self._next_row(seq)
        self.restore_fields(row, counters)
        self.num_unknown[row] = 0
        return row

    def resume(self, seq: Sequence, counters: dict[str, IntArray]) -> int:
        """Give ``seq`` the next row; fields that ``seq`` does not set are those of ``counters``."""
        row = self.add(seq)
        names = {name for name, kept in self.fields.items() if kept.new == ""} - _OF_THIS_RUN
        self.restore_fields(row, {name: counters[name] for name in (*names, "num_prompt")})
        return row

    def owner(self, row: int) -> Sequence:
        """The sequence of a row in use."""
        seq = self.sequences[row]
        assert seq is not None
        return seq

    def save(self, seq: Sequence) -> None:
        """Write the row's tokens and counts, and what it holds, back to its sequence."""
        row, blocks, layout = seq.row, self._blocks, self._blocks.layout
        seq.token_ids = self.token_ids[row, : self.num_tokens[row]].copy()
        seq.usage.logical_tokens = int(self.num_computed[row])
        seq.usage.compactions = int(self.compactions[row])
        seq.usage.blocks_released = int(self.blocks_released[row])
        seq.usage.peak_blocks = max(seq.usage.peak_blocks, int(self.peak_blocks[row]))
        held, lanes = blocks.entries(slice(row, row + 1)), layout.num_layers * layout.num_kv_heads
        seq.usage.held_entries = int(held[0]) * layout.layers_per_block * layout.heads_per_block
        seq.usage.held_tokens = -(-int(held[0]) // layout.groups)
        seq.usage.held_blocks = blocks.held_by_kind(slice(row, row + 1))
        seq.usage.held_counts = blocks.counts(slice(row, row + 1))
        seq.usage.remainder_entries = lanes * self.has_remainder(row)

    def drop(self, seq: Sequence) -> None:
        """Free an emptied row; the decoding rows stay in front."""
        if seq.row < self.num_decoding:
            self.num_decoding -= 1
            self._swap(seq.row, self.num_decoding)
        self.num_rows -= 1
        self._swap(seq.row, self.num_rows)
        self.sequences[self.num_rows], seq.row = None, -1

    def hashes(self, seq: Sequence, token_ids: IntArray, known: list[bytes]) -> list[bytes]:
        """Hashes of the columns of ``token_ids``, with which ``seq`` begins; some are ``known``."""
        size = self._blocks.layout.block_size
        seq.column_hashes = column_hashes(token_ids, size, known, seq.cache_seed)
        return seq.column_hashes

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the full columns of a row's first ``num_tokens`` that no event has changed."""
        row, size = seq.row, self._blocks.layout.block_size
        first = int(self.num_published[row])
        end = min(num_tokens, int(self.num_unmodified_tokens[row])) // size
        if end > first:
            hashes = self.hashes(seq, self.token_ids[row, : end * size], seq.column_hashes[:end])
            self._blocks.publish(row, first, hashes[first:end])
            self.num_published[row] = end

    def promote_ready(self) -> None:
        """Rows that got their first token, and have nothing to wait for, join the decoding ones."""
        behind = slice(self.num_decoding, self.num_rows)
        ready = self.caught_up[behind] & ~self._waits(behind)
        for row in np.flatnonzero(ready) + self.num_decoding:
            self._swap(int(row), self.num_decoding)
            self.num_decoding += 1

    def demote_waiting(self) -> None:
        """Decoding rows that wait for an event, or for their last token, skip this step."""
        for row in np.flatnonzero(self._waits(slice(0, self.num_decoding)))[::-1]:
            self.num_decoding -= 1
            self._swap(int(row), self.num_decoding)

    def decoding_next(self) -> IntArray:
        """Rows that can decode now, before they are moved to the front."""
        rows = slice(0, self.num_rows)
        return np.flatnonzero(self.caught_up[rows] & ~self._waits(rows)).astype(np.int32)

    def take_swaps(self) -> tuple[tuple[int, int], ...]:
        """Rows exchanged since the last call, in order."""
        swaps, self._swaps = tuple(self._swaps), []
        return swaps

    def tokens_from(self, at: IntArray, start: IntArray) -> IntArray:
        """Computed tokens of rows ``at`` from positions ``start`` on, padded behind: [n, T]."""
        last = self.num_computed[at] - 1
        places = start[:, None] + np.arange((last - start).max() + 1)
        tokens: IntArray = self.token_ids[at[:, None], np.minimum(places, last[:, None])]
        return tokens

    def _waits(self, rows: slice) -> BoolArray:
        """Which of ``rows`` have an event first, or have all the tokens they may have."""
        waits: BoolArray = self.num_computed[rows] >= self.next_event[rows]
        waits |= self.num_tokens[rows] >= self.max_len[rows]
        return waits

    def _next_row(self, seq: Sequence) -> int:
        row = self.num_rows
        self.num_rows += 1
        self.sequences[row] = seq
        seq.row, seq.status = row, SequenceStatus.RUNNING
        self.token_ids[row, : seq.num_tokens] = seq.token_ids
        missing = len(seq.stop_token_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(seq.stop_token_ids)] = seq.stop_token_ids
        return row

    def _swap(self, a: int, b: int) -> None:
        """Exchange two rows with all that belongs to them."""
        if a == b:
            return
        self._swaps.append((a, b))
        self._blocks.swap(a, b)
        longest = int(max(self.num_tokens[a], self.num_tokens[b]))
        self.token_ids[[a, b], :longest] = self.token_ids[[b, a], :longest]
        self.move_rows([a, b], [b, a])
        self.stop_ids[[a, b]] = self.stop_ids[[b, a]]
        self.sequences[a], self.sequences[b] = self.sequences[b], self.sequences[a]
        for row in (a, b):
            seq = self.sequences[row]
            if seq is not None:
                seq.row = row
