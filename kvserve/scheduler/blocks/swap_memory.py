"""Memory for rows that are away: preempted, or saved for a later turn of their conversation.

Their blocks lie in host memory, if they have left the pool. Their remainders lie at *places*, in
the device's array of the rows' own, behind the last row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.messages.output import RowMove, RowMoves
from kvserve.scheduler.messages.saved_row import NO_PLACE

if TYPE_CHECKING:
    from kvserve.scheduler.messages.continuation import Continuation


def num_places(max_rows: int, *, continuations: bool) -> int:
    """How many places an engine has: one for each row that may be preempted, and further ones for
    continuations."""
    return max_rows * (4 if continuations else 1)


class SwapMemory:
    """Host blocks and places, and what the device has to move. Preempted rows and continuations
    share them.

    In a step the device moves rows out first, after its row swaps, and back last. So a block or a
    place that a step reads is given back once the step's moves are taken.
    """

    def __init__(self, max_rows: int, places: int, host_blocks: int = 0) -> None:
        self.pool = BlockPool(host_blocks + 1)
        self._reserve, self._places = max_rows, places
        self._free = list(range(max_rows + places - 1, max_rows - 1, -1))
        self._discarded: list[int] = []
        self._outs: list[RowMove] = []
        self._copies: list[tuple[IntArray, IntArray]] = []
        self._ins: list[RowMove] = []
        self._read: list[IntArray] = []
        self._read_places: list[int] = []
        self.pinned = NO_PLACE
        """Of a row that is about to be resumed: it is read in this step, whoever gives it back."""

    def move_out(self, device: IntArray, row: int = NO_PLACE) -> IntArray:
        """Move ``device`` blocks to host blocks, which are returned; the first of them is the place
        of what policies keep of ``row``, if that leaves too."""
        host = self.pool.allocate(len(device))
        place = NO_PLACE if row == NO_PLACE else int(host[0])
        self._outs.append(RowMove(device, host, row, place))
        return host

    def move_in(self, host: IntArray, device: IntArray) -> None:
        """Copy host blocks to the blocks of a row that begins in this step."""
        self.pool.share(host)
        self._read.append(host)
        self._ins.append(RowMove(device, host))

    def copy(self, sources: IntArray, copies: IntArray) -> None:
        """Copy blocks of the pool, for a row that begins in this step."""
        self._copies.append((sources, copies))

    def bring_back(self, row: int, host: IntArray) -> None:
        """A row is back from ``host`` blocks, which are given back."""
        self._read.append(host)
        self._ins.append(RowMove(row=row, place=int(host[0])))

    def discard(self, host: IntArray) -> None:
        """A row in these host blocks will not come back."""
        self._discarded.append(int(host[0]))
        self.pool.release(host)

    def discard_all_of(self, gone: SwapMemory, others: list[int]) -> None:
        """Let the device forget what it keeps of rows in memory that is given up."""
        self._discarded += [*gone._discarded, *others]

    def have_place(self, *, preempted: bool) -> bool:
        """Whether a row finds a place; some are kept for rows that are preempted."""
        return len(self._free) > (0 if preempted else self._reserve)

    def save_remainder(self, row: int) -> int:
        """Take a place, and move the remainder of ``row`` there, which is about to be freed."""
        place = self._free.pop()
        self._outs.append(RowMove(row=row, remainder=place))
        return place

    def load_remainder(self, place: int, row: int) -> None:
        """Copy what lies at ``place``, if anything, to ``row``, which begins in this step."""
        if place != NO_PLACE:
            self._ins.append(RowMove(row=row, remainder=place))

    def keep(self, move: RowMove) -> None:
        """Copy what a row has beside its tables, before rows begin."""
        self._outs.append(move)

    def load(self, move: RowMove) -> None:
        """Copy it to a row that begins in this step."""
        self._ins.append(move)

    def release_place(self, place: int) -> None:
        """Give a place back, if it is one; if this step reads it, once its moves are taken."""
        if place == NO_PLACE:
            return
        if place == self.pinned or any(place == move.remainder for move in self._ins):
            self._read_places.append(place)
            return
        self._outs = [move for move in self._outs if move.remainder != place]
        self._free.append(place)

    def swap(self, a: int, b: int) -> None:
        """Follow two rows that are exchanged."""
        for moves in (self._outs, self._ins):
            for i, move in enumerate(moves):
                if move.row in (a, b):
                    moves[i] = replace(move, row=a + b - move.row)

    def take_moves(self) -> RowMoves | None:
        """What the device moves for rows that have left or begun since the last call."""
        if not (self._discarded or self._outs or self._copies or self._ins):
            return None
        moves = RowMoves(tuple(self._discarded), tuple(self._outs), ins=tuple(self._ins))
        if self._copies:
            sources, copies = map(np.concatenate, zip(*self._copies, strict=True))
            moves = replace(moves, copy_from=sources, copy_to=copies)
        for host in self._read:
            self.pool.release(host)
        self._free += self._read_places
        self._discarded, self._outs, self._copies, self._ins = [], [], [], []
        self._read, self._read_places = [], []
        return moves

    def check_integrity(self, blocks: list[IntArray], places: list[int]) -> None:
        """Every host block is free or in one of ``blocks``, every place free or in ``places``."""
        self.pool.check_integrity(np.concatenate([np.zeros(0, np.int32), *blocks]))
        places = [place for place in places if place != NO_PLACE]
        known = sorted(self._free + self._read_places + places)
        first = min(known, default=0)
        assert known == list(range(first, first + self._places)), "places leak, or have two owners"


class NoContinuations:
    """Does what is asked of ``Continuations`` where none are kept: ``host`` memory is for preempted
    rows alone."""

    num_evictable = num_blocks = num_hosted = 0
    oldest = None

    def __init__(self, host: SwapMemory) -> None:
        self.host = host
        self.all: list[Continuation] = []

    def __len__(self) -> int:
        return 0

    def have_host_blocks(self, count: int) -> bool:
        """Whether ``count`` host blocks are free."""
        return count <= self.host.pool.num_free

    def forget(self, blocks: IntArray) -> None:
        """No block is kept for later."""

    def clear(self) -> None:
        """There are none."""

    def named_blocks(self, *, hosted: bool = False) -> IntArray:
        return np.zeros(0, np.int32)

    def check_integrity(self) -> None:
        """There is nothing to agree."""
