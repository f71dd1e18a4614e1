"""Guesses of a second, smaller model (``method: draft_model``): who asks it, and for how many.

The device makes the guesses in the step that verifies them, so the host decides beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.draft_group import DraftGroup
from kvserve.scheduler.messages.drafts import NO_GUESSES, DraftChunks, Proposal
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.speculation.drafter import Chance
from kvserve.scheduler.speculation.speculation import Speculation

_TRIED = 2
"""Guesses of a row where it is tried whether guessing pays by now."""
_SHARE = 1 / 8
"""Most tokens that the draft model reads for such trials, by token that is generated."""
_KEPT = 64
"""Tokens that a first trial leaves to those behind it: a step that reads much is not measured."""
_MOST_SAVED = 4096


@dataclass(frozen=True)
class DraftModelSettings:
    """At most ``num_tokens`` are guessed of a row, and a step reads at most ``max_read`` tokens (by
    default as many as it computes) to catch up with rows."""

    num_tokens: int
    max_read: int | None = None


class DraftModelSpeculation(Speculation):
    """Lets the draft model read what rows have got since it guessed last, and guess again.

    It reads a prompt when its row first guesses, and nothing of rows whose guesses do not pay. If
    none pay, it is tried again now and then, with those rows of which there is least to read.
    """

    forget = 0.97  # sooner than a lookup: a new sequence's first guess costs reading its prompt

    def __init__(
        self, rows: RowTable, blocks: BlockManager, settings: DraftModelSettings, max_tokens: int
    ) -> None:
        super().__init__(rows, blocks, settings.num_tokens, max_tokens)
        self._max_read = settings.max_read or max_tokens
        group = blocks.find(DraftGroup)
        assert group is not None, "a draft model has a group of its own"
        self._group = group
        self._saved = 0.0
        """Tokens that trials may read by now."""

    def propose(self, *, scarce: bool = False) -> Proposal:
        self._saved = min(self._saved + _SHARE * self._rows.num_decoding, _MOST_SAVED)
        return super().propose(scarce=scarce)

    def _propose(self, at: IntArray, most: IntArray, least: float, *, scarce: bool) -> Proposal:
        if scarce:
            return NO_GUESSES
        behind = self._rows.num_tokens[at] - self._group.lens[at]
        if self.costs.tries_again(self._rows.num_decoding):
            guesses = self._trials(behind, most)
        else:
            worth = [
                self._drafter(row).worth(most_of_row, least)
                for row, most_of_row in zip(at.tolist(), most.tolist(), strict=True)
            ]
            guesses = np.array(worth, np.int32)
        guesses = np.clip(self._left - (np.cumsum(guesses) - guesses), 0, guesses)
        asks = guesses > 0
        return self._of(at[asks], behind[asks], guesses[asks]) if asks.any() else NO_GUESSES

    def _trials(self, behind: IntArray, most: IntArray) -> IntArray:
        """The guesses of rows that are ``behind [n]`` tokens, in a trial."""
        order = np.argsort(behind, kind="stable")
        tried = order[np.cumsum(behind[order]) + _KEPT <= self._saved]
        guesses = np.zeros_like(most)
        guesses[tried] = np.minimum(most[tried], _TRIED)
        self._saved -= float(behind[tried].sum())
        return guesses

    def _of(self, at: IntArray, behind: IntArray, guesses: IntArray) -> Proposal:
        """What the rows ``at [n]`` read and guess, if they find the blocks."""
        rows, group = self._rows, self._group
        lengths = np.clip(self._max_read - (np.cumsum(behind) - behind), 0, behind)
        guesses = np.where(lengths < behind, 0, guesses)
        at, lengths, guesses = (x[lengths > 0] for x in (at, lengths, guesses))
        starts = group.lens[at]
        read = starts + lengths
        # The entry of a last guess is never stored: nothing is guessed behind it.
        ends = read + np.maximum(guesses - 1, 0)
        drafts = self._drafts(at, guesses, group.missing(at, ends))
        if drafts is None:
            return NO_GUESSES
        group.read(at, read, ends)
        places = np.repeat(starts, lengths) + ragged_arange(lengths)
        token_ids = rows.token_ids[np.repeat(at, lengths), places]
        chunks = DraftChunks(at, starts, lengths, token_ids, guesses)
        return Proposal(drafts if guesses.any() else None, chunks)

    def _learn(self, at: IntArray, guessed: IntArray, right: IntArray) -> None:
        super()._learn(at, guessed, right)
        self._group.confirm(at, np.minimum(right, guessed - 1))

    def _new_drafter(self) -> Chance:
        return Chance(self._chance)
