"""Speculation: which rows guess how many tokens in a step, and what becomes of the guesses.

A guess is no token of its sequence until a step has confirmed it: lengths and positions count
confirmed tokens alone, and the blocks of the others go back. The next tokens overwrite the entries.

One rule decides. A step of n rows takes as long as reading the weights and n tokens do, so a guess
costs n / (n + w) of what a row's token costs, if reading the weights takes as long as w tokens do.
A row guesses while so large a share of its newest guesses was right, and at least half. Among more
than 6 w rows nobody guesses: more than six sevenths would have to be right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.drafts import Confirmed, Drafts, confirmed_of
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import SequenceStatus
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.stats import EngineStats

_FACTORS = np.random.default_rng(0).integers(2**20, 2**30, 64) * 2 + 1
_SMALL: list[int] = _FACTORS.tolist()
_BULK = 16
"""From so many new tokens on, numpy adds them faster than one by one."""


@dataclass(frozen=True)
class NgramSettings:
    """At most ``num_tokens`` are guessed from what followed the newest ``longest`` to ``shortest``
    tokens before, while at most ``most_rows`` decode."""

    num_tokens: int
    shortest: int
    longest: int
    most_rows: int = 4


class NgramIndex:
    """The newest place of each n-gram of a sequence, for each n from ``shortest`` to ``longest``.

    A table of places by hash, with the newest token's factor first: a collision loses the older
    n-gram, and never gives a wrong one, since tokens are compared. A table doubles as its sequence
    does.
    """

    def __init__(self, settings: NgramSettings) -> None:
        self._shortest, self._longest = settings.shortest, settings.longest
        self._known = 0
        """N-grams that end before here are in the tables."""
        self._asked: tuple[int, list[int]] = -1, []
        """The end of the n-grams that were last looked up, and their places."""
        self._make(10)

    def extend(self, token_ids: IntArray) -> None:
        """Add the n-grams of ``token_ids``, all tokens so far, that another token follows."""
        end = len(token_ids) - 1
        if 4 * end > 1 << self._bits:
            self._make(4 + end.bit_length())
        first, self._known = self._known, max(self._known, end)
        if end - first >= _BULK:
            for length, table in enumerate(self._tables, self._shortest):
                self._add(token_ids, length, table, max(first, length - 1), end)
            return
        for last in range(first, end):
            asked, places = self._asked
            if asked != last:
                places = self._places(token_ids, last)
            for place, table in zip(places, self._tables, strict=False):
                table[place] = last

    def guess(self, token_ids: IntArray, count: int) -> list[int]:
        """``count`` tokens to follow ``token_ids``, or none if its newest tokens are new to it.

        What followed the longest known n-gram, and again from its beginning if the sequence ends
        before.
        """
        newest = len(token_ids) - 1
        places = self._places(token_ids, newest)
        self._asked = newest, places
        for i in range(len(places) - 1, -1, -1):
            length, last = self._shortest + i, int(self._tables[i][places[i]])
            begins = last - length + 1
            if last >= 0 and (
                token_ids[begins : last + 1].tolist() == token_ids[newest - length + 1 :].tolist()
            ):
                known: list[int] = token_ids[last + 1 : last + 1 + count].tolist()
                return (known * -(-count // len(known)))[:count]
        return []

    def _add(self, token_ids: IntArray, length: int, table: IntArray, first: int, end: int) -> None:
        """Add the n-grams that end at ``first`` to ``end``; of equal ones the newest stays."""
        if first < end:
            ends = np.arange(first, end)
            grams = np.lib.stride_tricks.sliding_window_view(token_ids, length)
            hashes = grams[ends - length + 1] @ _FACTORS[:length][::-1]
            table[(hashes & 0xFFFFFFFF) >> (32 - self._bits)] = ends

    def _places(self, token_ids: IntArray, last: int) -> list[int]:
        """Where the n-grams that end at ``last`` are, the shortest first."""
        hashed, shift, places = 0, 32 - self._bits, []
        newest = token_ids[max(last + 1 - self._longest, 0) : last + 1].tolist()
        for length, token in enumerate(reversed(newest), 1):
            hashed += token * _SMALL[length - 1]
            if length >= self._shortest:
                places.append((hashed & 0xFFFFFFFF) >> shift)
        return places

    def _make(self, bits: int) -> None:
        """Empty tables of ``2 ** bits`` places, of the shortest n-grams first."""
        self._bits, self._known = bits, 0
        lengths = range(self._shortest, self._longest + 1)
        self._tables = [np.full(1 << bits, -1, np.int32) for _ in lengths]
        self._asked = -1, []


_NEVER = 2.0
"""A share that no row reaches."""
_NEWEST = 16
"""Guesses of a row that count: at least so many, in whole chunks."""
_PATIENCE, _LONGEST_BREAK = 4, 8
"""After so many lookups in a row that found nothing, each next one waits a token longer."""


class Drafter:
    """The guesses of one sequence, and how many of the newest were right. Half of those that it has
    not made yet count as right."""

    def __init__(self, settings: NgramSettings) -> None:
        self.ask_at = 0
        """The length of the sequence from which on it is asked."""
        self._most = settings.num_tokens
        self._index = NgramIndex(settings)
        self._newest = deque([(_NEWEST, _NEWEST // 2)])
        self.share = 0.5
        """How many of the newest guesses were right."""
        self._missed = 0
        """How often nothing was found since something was."""
        self._unverified: tuple[int, list[int]] = 0, []
        """A guess that no step verifies, and the length of the sequence before it."""

    def learn(self, guessed: int, right: int) -> None:
        """Of a chunk of ``guessed`` tokens the first ``right`` were confirmed."""
        self._newest.append((guessed, right))
        made = sum(count for count, _ in self._newest)
        while made - self._newest[0][0] >= _NEWEST:
            made -= self._newest.popleft()[0]
        self.share = sum(count for _, count in self._newest) / made

    def look_up(self, token_ids: IntArray, *, verifies: bool) -> list[int]:
        """Tokens to follow ``token_ids``, all of the sequence so far. If no step ``verifies`` them,
        they are compared later with those that have followed: that costs the device nothing."""
        size, (start, unverified) = len(token_ids), self._unverified
        if unverified:
            followed = token_ids[start : start + len(unverified)].tolist()
            pairs = enumerate(zip(unverified, followed, strict=False))
            wrong = (i for i, (guess, token) in pairs if guess != token)
            self.learn(len(followed), next(wrong, len(followed)))
        self._index.extend(token_ids)
        guess = self._index.guess(token_ids, self._most)
        self._missed = 0 if guess else self._missed + 1
        self._unverified = size, [] if verifies else guess
        self.ask_at = size + min(1 + self._missed // _PATIENCE, _LONGEST_BREAK)
        if self._unverified[1]:
            self.ask_at = size + len(guess)
        return guess


class Speculation:
    """Makes the drafts of decoding rows and takes in what a step has found of them. A row guesses
    nothing while its newest token is unknown."""

    def __init__(
        self,
        rows: RowTable,
        blocks: BlockManager,
        settings: NgramSettings,
        max_tokens: int,
        totals: EngineStats,
    ) -> None:
        """For steps of at most ``max_tokens``."""
        self._rows, self._blocks, self._settings = rows, blocks, settings
        self._max_tokens, self._totals = max_tokens, totals

    def propose(self) -> Drafts | None:
        """The drafts of a step, for its decoding rows.

        A row's chunk ends where its next event is due, or its last token. Guesses take at most half
        of the step, so that prompts move on beside them, and there are none in a step that lacks
        the blocks for them.
        """
        rows, n = self._rows, self._rows.num_decoding
        enough = self.enough(n)
        if enough > 1:
            return None
        known = rows.num_tokens[:n] - rows.num_unknown[:n]
        most = np.minimum(rows.next_event[:n] - 1, rows.max_len[:n] - 2) - rows.num_computed[:n]
        most = np.minimum(most, self._settings.num_tokens)
        overlaps, left = bool(rows.num_unknown[:n].any()), (self._max_tokens - n) // 2
        guesses = dict[int, list[int]]()
        for row in np.flatnonzero(known >= rows.guess_from[:n]).tolist():
            drafter, room = self._drafter(row), min(int(most[row]), left)
            verifies = drafter.share >= enough
            if verifies and (overlaps or room <= 0):
                continue
            guess = drafter.look_up(rows.token_ids[row, : known[row]], verifies=verifies)
            rows.guess_from[row] = drafter.ask_at
            if verifies and guess:
                guesses[row] = guess[:room]
                left -= len(guesses[row])
        return self._drafts(guesses) if guesses else None

    @property
    def rests(self) -> bool:
        """Whether the next step guesses nothing, whatever the tokens of this one are."""
        rows, n = self._rows, self._rows.num_decoding
        enough = self.enough(n)
        if enough > 1:
            return True
        asked = np.flatnonzero(rows.num_tokens[:n] >= rows.guess_from[:n]).tolist()
        return all(self._drafter(row).share < enough for row in asked)

    def enough(self, rows: int) -> float:
        """The share of right guesses from which on they pay in a step of so many decoding rows;
        above 1 if they never do."""
        most = self._settings.most_rows
        return max(0.5, rows / (rows + most / 6)) if rows <= most else _NEVER

    def _drafts(self, guesses: dict[int, list[int]]) -> Drafts | None:
        """Drafts of the decoding rows with the ``guesses`` of some of them; ``None`` without blocks
        for them."""
        rows, n = self._rows, self._rows.num_decoding
        lengths = np.ones(n, np.int32)
        lengths[list(guesses)] += [len(guess) for guess in guesses.values()]
        wanted = self._blocks.missing_blocks(slice(n), lengths, rows.num_computed[:n])
        if not self._blocks.have_free(wanted):
            return None
        token_ids, behind = np.zeros(int(lengths.sum()), np.int32), ragged_arange(lengths)
        token_ids[behind == 0] = rows.token_ids[np.arange(n), rows.num_tokens[:n] - 1]
        token_ids[behind > 0] = np.concatenate(list(guesses.values()))
        return Drafts(lengths, token_ids)

    def confirm(self, output: SchedulerOutput, sampled: IntArray) -> Confirmed | None:
        """What sequences get of the sampled tokens, if the step had drafts; counted here."""
        if (drafts := output.drafts) is None:
            return None
        confirmed = confirmed_of(drafts, sampled, self._rows.stop_ids[: len(drafts.lengths)])
        self._totals.drafts_total += int(np.count_nonzero(drafts.lengths > 1))
        self._totals.draft_tokens_total += drafts.num_guessed
        self._totals.accepted_tokens_total += len(confirmed.at) - len(confirmed.counts)
        return confirmed

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
        for row, made, well in zip(at.tolist(), guessed.tolist(), right.tolist(), strict=True):
            seq = rows.owner(row)
            seq.guesses.num_drafted += made
            seq.guesses.num_accepted += well
            self._drafter(row).learn(made, well)
        newest = confirmed.at[np.cumsum(confirmed.counts) - 1]
        return output.sampled_at + confirmed.counts - 1, sampled[newest]

    def _drafter(self, row: int) -> Drafter:
        seq = self._rows.owner(row)
        if seq.guesses.drafter is None:
            seq.guesses.drafter = Drafter(self._settings)
        drafter: Drafter = seq.guesses.drafter
        return drafter
