"""Speculation: which rows guess how many tokens in a step, and what becomes of the guesses.

A guess is no token of its sequence until a step has confirmed it: lengths and positions count
confirmed tokens alone, and the blocks of the others go back. The next tokens overwrite the entries.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.drafts import Confirmed, Drafts, confirmed_of
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import SequenceStatus
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.speculation.draft_costs import NEVER, DraftCosts
from kvserve.scheduler.speculation.drafter import Drafter
from kvserve.scheduler.speculation.ngram_index import NgramSettings

_FORGET = 0.99


class Speculation:
    """Makes the drafts of decoding rows and takes in what a step has found of them. No step is
    scheduled before the tokens of the one in front of it are known."""

    def __init__(
        self, rows: RowTable, blocks: BlockManager, settings: NgramSettings, max_tokens: int
    ) -> None:
        self.costs = DraftCosts()
        self._rows, self._blocks = rows, blocks
        self._settings = settings
        self._max_tokens = max_tokens
        self._chance = 2 / 3
        """How many guesses were right lately, of all sequences: what a new one begins with."""

    def propose(self) -> Drafts | None:
        """The drafts of a step, for its decoding rows; ``None`` if none guesses anything.

        A row's chunk ends where its next event is due, or its last token. Guesses take at most half
        of the step, so that prompts move on beside them, and there are none in a step that lacks
        the blocks for them.
        """
        rows, n = self._rows, self._rows.num_decoding
        asked = rows.num_tokens[:n] >= rows.guess_from[:n]
        least = self.costs.least_chance(n) if asked.any() else NEVER
        if least >= 1.0:
            return None
        most = np.minimum(rows.next_event[:n] - 1, rows.max_len[:n] - 2) - rows.num_computed[:n]
        most = np.minimum(most, self._settings.num_tokens)
        left = (self._max_tokens - n) // 2
        guesses = dict[int, list[int]]()
        for row in np.flatnonzero((most > 0) & asked).tolist():
            if not left:
                break
            drafter, known = self._drafter(row), rows.token_ids[row, : rows.num_tokens[row]]
            guess = drafter.draft(known, min(int(most[row]), left), least)
            rows.guess_from[row] = drafter.ask_at
            if guess:
                guesses[row], left = guess, left - len(guess)
        return self._with_blocks(n, guesses) if guesses else None

    def _with_blocks(self, n: int, guesses: dict[int, list[int]]) -> Drafts | None:
        """The drafts of the first n rows, of which some have ``guesses``, if there are blocks."""
        rows, lengths = self._rows, np.ones(n, np.int32)
        for row, guess in guesses.items():
            lengths[row] += len(guess)
        wanted = self._blocks.wanted(slice(n), lengths, rows.num_computed[:n])
        if not self._blocks.have_free(wanted):
            return None
        starts = np.cumsum(lengths) - lengths
        token_ids = np.zeros(int(lengths.sum()), np.int32)
        token_ids[starts] = rows.token_ids[np.arange(n), rows.num_tokens[:n] - 1]
        for row, guess in guesses.items():
            token_ids[starts[row] + 1 : starts[row] + lengths[row]] = guess
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
        for row, drafted, accepted in zip(
            at.tolist(), guessed.tolist(), right.tolist(), strict=True
        ):
            seq = rows.owner(row)
            seq.num_drafted += drafted
            seq.num_accepted += accepted
            self._drafter(row).learn(drafted, accepted)
            trials = min(accepted + 1, drafted)
            self._chance += (1 - _FORGET**trials) * (accepted / trials - self._chance)
        newest = confirmed.at[np.cumsum(confirmed.counts) - 1]
        return output.sampled_at + confirmed.counts - 1, sampled[newest]

    def _drafter(self, row: int) -> Drafter:
        seq = self._rows.owner(row)
        if seq.drafter is None:
            seq.drafter = Drafter(self._settings, self._chance)
        drafter: Drafter = seq.drafter
        return drafter
