"""Places for the remainders of rows that are away: preempted, or saved for a later turn.

A row's own remainder lies beside its blocks, at the row's number. The device has one array for
both: the places lie behind the last row.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NO_MOVES, RemainderMoves

NOTHING = -1
"""The place of a row that has no remainder."""
PLACES_PER_ROW, SAVED_PER_ROW = 1, 3
"""Places for each row that may be preempted, and further ones for continuations."""


def num_places(max_rows: int, *, continuations: bool) -> int:
    """How many places an engine has."""
    return max_rows * (PLACES_PER_ROW + SAVED_PER_ROW * continuations)


class RemainderPlaces:
    """Moves between rows and places since the last ``take``; rows are numbered as at that time.

    On the device all saves of a step come after its row swaps, and all loads after its saves.
    """

    def __init__(self, max_rows: int, count: int) -> None:
        self._reserve = max_rows * PLACES_PER_ROW
        self._free = list(range(max_rows + count - 1, max_rows - 1, -1))
        self._count = count
        self._saves: list[list[int]] = []
        self._loads: list[list[int]] = []
        self._read: list[int] = []

    def have_free(self, *, preempted: bool) -> bool:
        """Whether a row finds a place; some are kept for rows that are preempted."""
        return len(self._free) > (0 if preempted else self._reserve)

    def save(self, row: int) -> int:
        """Take a place, and move the remainder of ``row`` there, which is about to be freed."""
        place = self._free.pop()
        self._saves.append([row, place])
        return place

    def load(self, place: int, row: int) -> None:
        """Copy what lies at ``place`` to ``row``, which begins in this step."""
        if place != NOTHING:
            self._loads.append([place, row])

    def release(self, place: int) -> None:
        """Give a place back; if this step reads it, once the step's moves are taken."""
        if place == NOTHING:
            return
        if any(place == source for source, _ in self._loads):
            self._read.append(place)
            return
        self._saves = [move for move in self._saves if move[1] != place]
        self._free.append(place)

    def swap(self, a: int, b: int) -> None:
        """Follow two rows that are exchanged."""
        for moves, end in ((self._saves, 0), (self._loads, 1)):
            for move in moves:
                move[end] = {a: b, b: a}.get(move[end], move[end])

    def take(self) -> tuple[RemainderMoves, RemainderMoves]:
        """Saves and loads since the last call."""
        taken = tuple(_moves(moves) for moves in (self._saves, self._loads))
        self._free += self._read
        for moves in (self._saves, self._loads, self._read):
            moves.clear()
        saves, loads = taken
        return saves, loads

    def check_integrity(self, held: list[int]) -> None:
        """Every place is free or ``held`` by one row that is away."""
        known = sorted(self._free + self._read + [place for place in held if place != NOTHING])
        first = min(known, default=0)
        assert known == list(range(first, first + self._count)), "places leak, or have two owners"


def _moves(pairs: list[list[int]]) -> RemainderMoves:
    if not pairs:
        return NO_MOVES
    both: IntArray = np.array(pairs, np.int32)
    return RemainderMoves(both[:, 0], both[:, 1])
