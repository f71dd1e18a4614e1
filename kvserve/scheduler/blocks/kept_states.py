"""States that later prompts may begin with, kept beside the columns that the prefix cache has.

Blocks hold something of each of their tokens. A state is of all tokens before it, so it is there
where it was kept alone: at the end of a column, whose hash it is found by. It lies at a *place*
behind the device's last row, and goes with that column, or when another one needs its place and it
is the least recently used.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.prefix_cache import PrefixCache
from kvserve.scheduler.blocks.swap_memory import SwapMemory
from kvserve.scheduler.messages.output import RowMove
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.stats import EngineStats


@dataclass(frozen=True, slots=True)
class StateMove(RowMove):
    """A row's state is copied to the place ``state``, or from there."""

    state: int = NO_PLACE


class KeptStates(PrefixCache):
    """The prefix cache, and which of its columns end with a kept state.

    A row's state is there once the step that computes it is done. So the next step copies it to its
    place, before rows begin, and may be the first that copies it from there to a row.
    """

    def __init__(
        self,
        pool: BlockPool,
        memory: SwapMemory,
        places: range,
        state_bytes: int,
        totals: EngineStats,
    ) -> None:
        """``memory`` tells the device what moves; ``totals`` say how many bytes are kept."""
        super().__init__(pool)
        self._memory, self._state_bytes, self._totals = memory, state_bytes, totals
        self._all, self._unused = places, list(places)
        self._kept: dict[bytes, int] = {}
        """Places, by the hashes of columns; the least recently used is the first."""
        self._coming: dict[bytes, tuple[int, int]] = {}
        """The rows and places of those that the step being scheduled computes."""

    def newest(self, hashes: list[bytes], every: int) -> int:
        """How many columns the longest prefix of ``hashes`` has whose state is kept. Those of
        multiples of ``every`` columns are."""
        most = len(hashes) // every * every
        return next((n for n in range(most, 0, -every) if hashes[n - 1] in self._kept), 0)

    def load(self, digest: bytes, row: int) -> None:
        """Let ``row``, which begins in this step, begin with a kept state."""
        self._kept[digest] = place = self._kept.pop(digest)
        self._memory.load(StateMove(row=row, state=place))

    def keep(self, digest: bytes, row: int) -> None:
        """Keep what this step leaves of ``row``, unless it is there."""
        if digest in self._kept:
            self._kept[digest] = self._kept.pop(digest)
        elif digest not in self._coming:
            if not self._unused and self._kept:
                self._unused.append(self._kept.pop(next(iter(self._kept))))
            if self._unused:
                self._coming[digest] = row, self._unused.pop()

    def step_ends(self) -> None:
        """A step is scheduled, and its moves are taken: what it computes moves in the next one."""
        for digest, (row, place) in self._coming.items():
            self._kept[digest] = place
            self._memory.keep(StateMove(row=row, state=place))
        self._coming.clear()
        self._totals.kept_state_bytes = self._state_bytes * len(self._kept)

    def check_integrity(self) -> None:
        """Every place is unused, or of one column that is there."""
        coming = [place for _, place in self._coming.values()]
        assert sorted([*self._unused, *self._kept.values(), *coming]) == list(self._all)
        assert self._kept.keys() <= self._places.keys(), "a state without its column"

    def _drop(self, places: list[int]) -> None:
        for place in places:
            digest = self._digests[place]
            coming = self._coming.pop(digest, None)
            kept = self._kept.pop(digest, None) if coming is None else coming[1]
            self._unused += [] if kept is None else [kept]
        super()._drop(places)
        self._totals.kept_state_bytes = self._state_bytes * len(self._kept)
