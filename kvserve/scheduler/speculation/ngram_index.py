"""Prompt lookup: where the newest tokens of a sequence have occurred before in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray

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
