"""The waiting queue, in the order of admission."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvserve.scheduler.messages.sequence import Sequence


class WaitingQueue:
    """Sequences by priority (lower first), then by arrival; preempted ones arrived earlier."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence:
        """The next to be admitted."""
        return self._sequences[0]

    def add(self, seq: Sequence) -> None:
        """Queue a sequence in its place."""
        insort(self._sequences, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        place = bisect_left(self._sequences, _order(seq), key=_order)
        assert self._sequences[place] is seq
        del self._sequences[place]


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.priority, seq.arrival
