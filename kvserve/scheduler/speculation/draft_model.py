"""Guesses of a second, smaller model (``method: draft_model``): who asks it, and for how many.

The device makes the guesses in the step that verifies them, so the host decides beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.draft_group import DraftGroup
from kvserve.scheduler.messages.drafts import NEWEST, NO_GUESSES, DraftChunks, Proposal
from kvserve.scheduler.rows.row_table import BoolArray, RowTable
from kvserve.scheduler.speculation.drafter import Chance
from kvserve.scheduler.speculation.speculation import Speculation

_TRIED = 2
"""Guesses of a row where it is tried whether guessing pays by now."""
_PRICE = 8
"""Tokens that have to be generated for each that is read to try whether guessing pays."""
_FIRST_CREDIT, _MOST_CREDIT = 2_048 * _PRICE, 4_096 * _PRICE


@dataclass(frozen=True)
class DraftModelSettings:
    """At most ``num_tokens`` are guessed of a row, and a step reads at most ``max_read`` tokens (by
    default as many as it computes) to catch up with rows."""

    num_tokens: int
    max_read: int | None = None


class DraftModelSpeculation(Speculation):
    """Lets the draft model read what rows have got since it guessed last, and guess again.

    It reads a prompt when its row first guesses, and nothing of rows whose guesses do not pay. It
    catches up with no more tokens than are generated; with an eighth of them while nobody knows
    whether that pays, and if it did not, to try it again now and then. Rows of which there is least
    to read come first.
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
        self._credit = _FIRST_CREDIT
        """Tokens generated that have not paid for tokens read."""

    def propose(self, *, scarce: bool = False, alone: bool = True) -> Proposal:
        self._credit = min(self._credit + self._rows.num_decoding, _MOST_CREDIT)
        return super().propose(scarce=scarce, alone=alone)

    def _propose(self, at: IntArray, most: IntArray, least: float, *, scarce: bool) -> Proposal:
        if scarce:
            return NO_GUESSES
        n = self._rows.num_decoding
        behind = self._rows.num_tokens[at] - self._group.lens[at]
        if self.costs.tries_again(n):
            guesses = np.minimum(most, _TRIED)
        else:
            worth = [
                self._drafter(row).worth(most_of_row, least)
                for row, most_of_row in zip(at.tolist(), most.tolist(), strict=True)
            ]
            guesses = np.array(worth, np.int32)
        price = 1 if self.costs.pays(n) else _PRICE
        guesses[~self._affords(np.where(guesses > 0, behind, 0), price)] = 0
        guesses = np.clip(self._left - (np.cumsum(guesses) - guesses), 0, guesses)
        asks = guesses > 0
        at, behind, guesses = at[asks], behind[asks], guesses[asks]
        expected = map(lambda row, count: self._drafter(row).expected(count), at, guesses)
        if not len(at) or not self._gains(sum(expected), int(guesses.sum())):
            return NO_GUESSES
        return self._of(at, behind, guesses, price)

    def _affords(self, behind: IntArray, price: int) -> BoolArray:
        """Which of n rows may read the ``behind [n]`` tokens that they lack: those that lack least,
        while there is credit. What is new since a row's last guesses costs nothing."""
        new = behind <= NEWEST
        affords: BoolArray = new | (_up_to(np.where(new, 0, behind)) * price <= self._credit)
        return affords

    def _of(self, at: IntArray, behind: IntArray, guesses: IntArray, price: int) -> Proposal:
        """What the rows ``at [n]`` read and guess, if they find the blocks; each token that they
        catch up with costs its ``price``."""
        rows, group = self._rows, self._group
        lengths = np.clip(self._max_read - (_up_to(behind) - behind), 0, behind)
        guesses = np.where(lengths < behind, 0, guesses)
        at, lengths, guesses = (x[lengths > 0] for x in (at, lengths, guesses))
        group.make_room(at)
        starts, dropped = group.lens[at], group.dropped[at]
        read = starts + lengths
        # The entry of a last guess is never stored: nothing is guessed behind it.
        ends = read + np.maximum(guesses - 1, 0)
        drafts = self._drafts(at, guesses, group.missing(at, ends))
        if drafts is None:
            return NO_GUESSES
        group.read(at, read, ends)
        self._credit -= price * int(lengths[lengths > NEWEST].sum())
        places = np.repeat(starts, lengths) + ragged_arange(lengths)
        token_ids = rows.token_ids[np.repeat(at, lengths), places]
        chunks = DraftChunks(at, starts, dropped, lengths, token_ids, guesses)
        return Proposal(drafts if guesses.any() else None, chunks)

    def _learn(self, at: IntArray, guessed: IntArray, right: IntArray) -> None:
        super()._learn(at, guessed, right)
        self._group.confirm(at, np.minimum(right, guessed - 1))

    def _new_drafter(self) -> Chance:
        return Chance(self._chance)


def _up_to(numbers: IntArray) -> IntArray:
    """The sum of each of ``numbers [n]`` and of all that come before it in their order: [n]."""
    order, sums = np.argsort(numbers, kind="stable"), np.empty_like(numbers)
    sums[order] = np.cumsum(numbers[order])
    return sums
