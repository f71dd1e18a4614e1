"""Speculation: which rows guess how many tokens in a step, and what becomes of the guesses.

A guess is no token of its sequence until a step has confirmed it: lengths and positions count
confirmed tokens alone, and the blocks of the others go back. The next tokens overwrite the entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.drafts import (
    Confirmed,
    Drafts,
    confirmed_of,
)
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import SequenceStatus
from kvserve.scheduler.rows.row_table import BoolArray, RowTable
from kvserve.scheduler.speculation.draft_costs import DraftCosts
from kvserve.scheduler.speculation.drafter import Chance


class Speculation(ABC):
    """Makes the drafts of decoding rows and takes in what a step has found of them. A row guesses
    nothing while its newest token is unknown."""

    forget: ClassVar[float] = 0.99
    """What is left of each guess, behind the next one, in how likely a new sequence's first is."""

    def __init__(
        self, rows: RowTable, blocks: BlockManager, most_guesses: int, max_tokens: int
    ) -> None:
        """``most_guesses`` of a row, in steps of at most ``max_tokens``."""
        self.costs = DraftCosts(most_guesses)
        self._rows, self._blocks = rows, blocks
        self._most_guesses, self._max_tokens = most_guesses, max_tokens
        self._chance = 2 / 3
        """How many guesses were right lately, of all sequences: what a new one begins with."""
        self._alone = True
        """Whether the last step had neither prompts nor events, as far as was known."""

    def propose(self, *, alone: bool = True) -> Drafts | None:
        """The drafts of a step, for its decoding rows. ``alone``: the step has no events, and none
        waits.

        A row's chunk ends where its next event is due, or its last token. Guesses take at most half
        of the step, so that prompts move on beside them, and there are none in a step that lacks
        the blocks for them.
        """
        rows, n = self._rows, self._rows.num_decoding
        if self.costs.rest(n):
            return None
        asked = self._asked
        if not asked.any():
            return None
        self._alone = alone and bool(rows.caught_up[n : rows.num_rows].all())
        least = self.costs.least_chance(n, measured=self._alone)
        if least >= 1.0 or rows.num_unknown[:n].any():
            return None
        most = np.minimum(rows.next_event[:n] - 1, rows.max_len[:n] - 2) - rows.num_computed[:n]
        most = np.minimum(most, self._most_guesses)
        at = np.flatnonzero((most > 0) & asked).astype(np.int32)
        return self._propose(at, most[at], least)

    @property
    def rests(self) -> bool:
        """Whether the next step guesses nothing, whatever the tokens of this one are."""
        rows = self._rows.num_decoding
        return not self._asked.any() or self.costs.rests(rows, measured=self._alone)

    @property
    def _asked(self) -> BoolArray:
        """Which decoding rows may guess."""
        rows, n = self._rows, self._rows.num_decoding
        asked: BoolArray = rows.num_tokens[:n] >= rows.guess_from[:n]
        return asked

    @abstractmethod
    def _propose(self, at: IntArray, most: IntArray, least: float) -> Drafts | None:
        """The drafts of the rows ``at [n]``, of at most ``most [n]`` guesses each, all together
        ``_left``; each guess has at least the chance ``least``."""

    @abstractmethod
    def _new_drafter(self) -> Chance:
        """What a sequence begins with."""

    @property
    def _left(self) -> int:
        """Most guesses of a step."""
        return (self._max_tokens - self._rows.num_decoding) // 2

    def _gains(self, expected: float, guessed: int) -> bool:
        """Whether the step is worth its guesses, of which ``expected`` will be right."""
        return self.costs.gains(self._rows.num_decoding, expected, guessed)

    def _drafts(self, at: IntArray, guesses: list[list[int]]) -> Drafts | None:
        """Drafts of the decoding rows, in which the rows ``at [n]`` have these ``guesses``, in
        order; ``None`` without blocks for them."""
        rows, n = self._rows, self._rows.num_decoding
        lengths = np.ones(n, np.int32)
        lengths[at] += np.array([len(guess) for guess in guesses], np.int32)
        wanted = self._blocks.wanted(slice(n), lengths, rows.num_computed[:n])
        if not self._blocks.have_free(wanted):
            return None
        token_ids = np.zeros(int(lengths.sum()), np.int32)
        starts = np.cumsum(lengths) - lengths
        token_ids[starts] = rows.token_ids[np.arange(n), rows.num_tokens[:n] - 1]
        token_ids[np.flatnonzero(ragged_arange(lengths))] = np.concatenate(guesses)
        return Drafts(lengths, token_ids)

    def confirm(self, drafts: Drafts, sampled: IntArray) -> Confirmed:
        """What the sequences of a step get of the tokens ``sampled`` in it."""
        n = len(drafts.lengths)
        return confirmed_of(drafts, sampled, self._rows.stop_ids[:n])

    def take_in(
        self, output: SchedulerOutput, sampled: IntArray, confirmed: Confirmed
    ) -> tuple[IntArray, IntArray]:
        """Record all confirmed tokens of rows with drafts but the newest, and give back the blocks
        of guesses. Returns the place and the newest token of each sequence."""
        drafts, rows = output.drafts, self._rows
        assert drafts is not None
        guessing = np.flatnonzero(drafts.lengths > 1)
        runs = [output.sampled[i].status is SequenceStatus.RUNNING for i in guessing]
        at = guessing[runs].astype(np.int32)
        right, guessed = confirmed.counts[at] - 1, drafts.lengths[at] - 1
        places = drafts.starts[at]
        source = np.repeat(places, right) + ragged_arange(right)
        to = np.repeat(output.sampled_at[at], right) + ragged_arange(right)
        rows.token_ids[np.repeat(at, right), to] = sampled[source]
        rows.num_tokens[at] += right
        rows.num_computed[at] += right
        self._blocks.advance(at, right)
        self._blocks.give_back_unused(at, rows.num_computed[at])
        self._learn(at, guessed, right)
        newest = confirmed.at[np.cumsum(confirmed.counts) - 1]
        return output.sampled_at + confirmed.counts - 1, sampled[newest]

    def _learn(self, at: IntArray, guessed: IntArray, right: IntArray) -> None:
        """Of ``guessed [n]`` tokens of rows ``at [n]`` the first ``right [n]`` are confirmed."""
        for row, drafted, accepted in zip(
            at.tolist(), guessed.tolist(), right.tolist(), strict=True
        ):
            seq = self._rows.owner(row)
            seq.num_drafted += drafted
            seq.num_accepted += accepted
            self._drafter(row).learn(drafted, accepted)
            trials = min(accepted + 1, drafted)
            self._chance += (1 - self.forget**trials) * (accepted / trials - self._chance)

    def _drafter(self, row: int) -> Chance:
        seq = self._rows.owner(row)
        if seq.drafter is None:
            seq.drafter = self._new_drafter()
        drafter: Chance = seq.drafter
        return drafter
