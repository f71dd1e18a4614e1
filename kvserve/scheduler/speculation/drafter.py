"""The guesses of one sequence, and how often they were right."""

from __future__ import annotations

from math import log

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.speculation.ngram_index import NgramIndex, NgramSettings

_FORGET = 0.95
_FIRST = 1.5
"""Guesses that the chance of other sequences counts for."""
_LOOK_EVERY = 8
"""Tokens after which a sequence without drafts makes a guess that no step verifies."""
_PATIENCE, _SHORT_BREAK, _LONG_BREAK = 4, 4, 32
"""Where nothing was found so often, as many tokens as twice before pass to the next lookup: at last
as many as there are sequences, since a step that many share is short beside all their lookups."""


class Chance:
    """How likely the next guess of one sequence is right: the share of the newest ones that were.
    A guess counts as right with it."""

    def __init__(self, chance: float) -> None:
        """``chance``: how likely its first guess is right."""
        self._right, self._made = _FIRST * chance, _FIRST

    def learn(self, guessed: int, right: int) -> None:
        """Of ``guessed`` tokens the first ``right`` were confirmed; those behind a wrong one say
        nothing."""
        trials = min(right + 1, guessed)
        kept = _FORGET**trials
        self._right = kept * self._right + right
        self._made = kept * self._made + trials

    def worth(self, most: int, least_chance: float) -> int:
        """How many tokens are confirmed with at least this chance, if at most ``most``."""
        chance = self._right / self._made
        if chance < least_chance:
            return 0
        if least_chance <= 0.0 or chance >= 1.0:
            return most
        return min(most, int(log(least_chance) / log(chance)))

    def expected(self, count: int) -> float:
        """How many of so many guesses in a row will be right."""
        chance = self._right / self._made
        return count if chance >= 1.0 else chance * (1 - chance**count) / (1 - chance)


class Drafter(Chance):
    """Decides how many tokens of its sequence to guess: those that are likely enough to be right.

    While the chance is too low, one guess now and then is compared with the next token, which costs
    the device nothing.
    """

    def __init__(self, settings: NgramSettings, chance: float) -> None:
        super().__init__(chance)
        self._index = NgramIndex(settings)
        self._missed = 0
        """How often nothing was found since something was."""
        self.ask_at = 0
        """The length of the sequence from which there may be a guess."""
        self._open: tuple[int, int] | None = None
        """The place and the token of a guess that no step verifies."""

    def draft(
        self, token_ids: IntArray, most: int, least_chance: float, rows: int = 1
    ) -> list[int]:
        """At most ``most`` tokens to follow ``token_ids``, all of the sequence so far; each has at
        least this chance to be confirmed. The step has so many ``rows``."""
        size = len(token_ids)
        if self._open is not None and self._open[0] < size:
            place, token = self._open
            self._open = None
            self.learn(1, int(token_ids[place] == token))
        count = self.worth(most, least_chance)
        self._index.extend(token_ids)
        guess = self._index.guess(token_ids, max(count, 1))
        self._missed = 0 if guess else self._missed + 1
        longest = min(max(rows, _SHORT_BREAK), _LONG_BREAK)
        self.ask_at = size + min(1 << min(self._missed // _PATIENCE, 5), longest)
        if not count:
            self.ask_at = size + _LOOK_EVERY
            self._open = (size, guess[0]) if guess else None
        return guess[:count]
