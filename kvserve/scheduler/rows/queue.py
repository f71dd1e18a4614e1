"""The waiting queue: whose turn it is to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvserve.scheduler.messages.sequence import Sequence

_Rank = tuple[int, int, bool, int, int]


@dataclass(slots=True)
class _Client:
    """``served``: tokens computed for it. ``running``: sequences of it that hold a row."""

    served: int
    running: int = 0
    waiting: list[Sequence] = field(default_factory=list)
    """By priority (lower first), then by arrival; preempted ones arrived earlier."""
    rank: _Rank | None = None
    """Its newest in the heap."""


class WaitingQueue:
    """Sequences by priority; of equal ones, a sequence of the client that was served least is next.

    Clients without a row come before those that hold one, these before those that hold two or
    three, and so on by powers of two (``share``); then preempted sequences come before new ones,
    whoever sent them. The order among one client's sequences is that of their arrival. A client
    that had nothing waiting begins with what the client whose turn it is was served: having been
    idle is no credit. A client that holds ``most_rows`` waits until one of its sequences ends.

    A turn takes logarithmic time: the heap has each client's rank, and older ranks, which are
    dropped where they come up.
    """

    def __init__(self, most_rows: int | None = None) -> None:
        self._most_rows = most_rows
        self._clients: dict[str, _Client] = {}
        """Those that wait or run."""
        self._ranks: list[tuple[_Rank, str]] = []
        self._now = 0
        """What the client that was admitted last had been served by then."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Client by client, each one's in the order of admission."""
        for client in self._clients.values():
            yield from client.waiting

    @property
    def first(self) -> Sequence | None:
        """The next to be admitted; ``None`` if nobody waits who may get a row."""
        while self._ranks:
            rank, name = self._ranks[0]
            client = self._clients.get(name)
            if client is not None and rank == client.rank:
                return client.waiting[0]
            heappop(self._ranks)
        return None

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence in its place."""
        client = self._clients.setdefault(seq.client, _Client(self._now))
        if not client.waiting:
            client.served = max(client.served, self._now)
        insort(client.waiting, seq, key=_order)
        self._length += 1
        self._push(seq.client)

    def put_back(self, seq: Sequence) -> None:
        """Queue a sequence that has lost its row."""
        self._clients[seq.client].running -= 1
        self.add(seq)

    def admit(self, seq: Sequence, tokens: int) -> None:
        """Take out a sequence that has got a row, with ``tokens`` to compute."""
        client = self._clients[seq.client]
        client.running += 1
        self._now = max(self._now, client.served)
        client.served += tokens
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        waiting = self._clients[seq.client].waiting
        place = bisect_left(waiting, _order(seq), key=_order)
        assert waiting[place] is seq
        del waiting[place]
        self._length -= 1
        self._push(seq.client)

    def count_ended(self, seq: Sequence, tokens: int) -> None:
        """Count a sequence that has ended in its row, and the ``tokens`` that it has generated."""
        client = self._clients[seq.client]
        client.running -= 1
        client.served += tokens
        self._push(seq.client)

    @staticmethod
    def share(num_rows: int) -> int:
        """How much of an engine a client has that holds so many rows: 0, 1, 2 (two or three)..."""
        return num_rows.bit_length()

    def num_rows(self, client: str) -> int:
        """How many rows a client that waits or runs holds."""
        return self._clients[client].running

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Clients are those of the sequences that wait or run, and each is within its bound."""
        counts = Counter(seq.client for seq in running)
        assert counts == Counter({name: each.running for name, each in self._clients.items()})
        assert all(each.running or each.waiting for each in self._clients.values())
        assert self._length == sum(len(each.waiting) for each in self._clients.values())
        assert self._most_rows is None or max(counts.values(), default=0) <= self._most_rows

    def _push(self, name: str) -> None:
        """Note a client's rank, which has changed; forget a client that has nothing here."""
        client = self._clients[name]
        if not (client.waiting or client.running):
            del self._clients[name]
            return
        rank = self._rank(client)
        if rank is not None and rank != client.rank:
            heappush(self._ranks, (rank, name))
        client.rank = rank

    def _rank(self, client: _Client) -> _Rank | None:
        """What decides when a client's next sequence is admitted; ``None`` if it may not be."""
        full = self._most_rows is not None and client.running >= self._most_rows
        if full or not client.waiting:
            return None
        seq = client.waiting[0]
        is_new, share = not seq.replay_until, self.share(client.running)
        return seq.priority, share, is_new, client.served if is_new else 0, seq.arrival


def _order(seq: Sequence) -> tuple[int, int]:
    return seq.priority, seq.arrival
