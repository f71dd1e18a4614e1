"""Continuations in host memory: they have made room in the pool, and can still be resumed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.remainder_places import RemainderPlaces
from kvserve.scheduler.messages.continuation import Continuation, named_by
from kvserve.scheduler.messages.output import NO_PLACE, SwapTask


class HostedRows:
    """Continuations whose rows lie in the host blocks of ``pool``, least recently used first.

    Preempted rows use the same pool, and may drop continuations from it. In a step the device
    moves blocks to host memory first, and from there last. So a host block that a step reads is
    kept until the step's tasks are taken.
    """

    def __init__(self, pool: BlockPool, remainders: RemainderPlaces) -> None:
        self.pool = pool
        self.remainders = remainders
        self.on_drop: Callable[[Continuation], None] = lambda known: None
        """Called for each continuation that leaves host memory for good."""
        self._by_use: OrderedDict[int, Continuation] = OrderedDict()
        self._outs: list[SwapTask] = []
        self._ins: list[SwapTask] = []
        self._read: list[IntArray] = []
        self.num_held = 0
        """References of continuations: to look at thousands of these takes 30 ms."""

    def __len__(self) -> int:
        return len(self._by_use)

    def __contains__(self, known: Continuation) -> bool:
        return self._by_use.get(id(known)) is known

    @property
    def all(self) -> list[Continuation]:
        """The least recently used one first."""
        return list(self._by_use.values())

    def park(self, known: Continuation) -> IntArray | None:
        """Move a continuation to host memory, if it fits: returns the blocks that it had before,
        which the caller releases."""
        assert known.row is not None and not known.hosted
        device = known.row.named
        if not self.have_free(len(device)):
            return None
        host = self.pool.allocate(len(device))
        known.row, known.hosted = known.row.renamed(host), True
        self._outs.append(SwapTask(NO_PLACE, NO_PLACE, device, host))
        self.touch(known)
        return device

    def have_free(self, count: int) -> bool:
        """Whether ``count`` host blocks are free; drops continuations if that makes them so."""
        missing = count - self.pool.num_free
        if missing > 0 and missing > self.num_held:
            return False
        while count > self.pool.num_free and self._by_use:
            oldest = next(iter(self._by_use.values()))
            self.release(oldest)
            self.on_drop(oldest)
        return count <= self.pool.num_free

    def load(self, host: IntArray, device: IntArray) -> None:
        """Copy host blocks to the blocks of a row that begins in this step."""
        self.pool.share(host)
        self.release_after_step(host)
        self._ins.append(SwapTask(NO_PLACE, NO_PLACE, device, host))

    def release_after_step(self, host: IntArray) -> None:
        """Release host blocks that this step reads, once its tasks are taken."""
        self._read.append(host)

    def touch(self, known: Continuation) -> None:
        """Make it the last to be dropped."""
        if known not in self and known.row is not None:
            self.num_held += len(known.row.named)
        self._by_use[id(known)] = known
        self._by_use.move_to_end(id(known))

    def send_first(self, known: Continuation) -> None:
        """Make it the first to be dropped."""
        self._by_use.move_to_end(id(known), last=False)

    def release(self, known: Continuation) -> None:
        """Free its host blocks."""
        assert known.row is not None and known.hosted
        del self._by_use[id(known)]
        named = known.row.named
        self.num_held -= len(named)
        self.pool.release(named)
        self.remainders.release(known.row.remainder)
        known.row, known.hosted = None, False

    def take_tasks(self) -> tuple[tuple[SwapTask, ...], tuple[SwapTask, ...]]:
        """Moves to host memory and from there since the last call."""
        tasks = tuple(self._outs), tuple(self._ins)
        for host in self._read:
            self.pool.release(host)
        for taken in (self._outs, self._ins, self._read):
            taken.clear()
        return tasks

    def held(self) -> IntArray:
        """Every host block that continuations hold, once per reference."""
        return named_by(self._by_use.values())
