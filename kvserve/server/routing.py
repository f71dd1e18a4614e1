"""Which replica takes a request: the one whose requests hold the fewest tokens, unless another has
enough of the prompt in its prefix cache to make up for the difference.

Plain counting, without Ray: `server/replicas.py` and the simulation in `bench/router.py` use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.prefix_cache import column_hashes

_COLUMN = 64
"""Prompt tokens for each hash: what prompts share is told no finer than that."""

_COLUMNS_KNOWN = 2**17


@dataclass(slots=True)
class _Request:
    """``columns`` are the hashes of its prompt; ``held`` counts on ``replica`` once it is sent."""

    columns: list[bytes]
    held: int
    replica: str | None = None


@dataclass(slots=True)
class _Load:
    """Tokens that a replica's requests hold; ``chosen`` tells which was taken last."""

    held: int = 0
    chosen: int = 0


class HeldTokenRouter:
    """Counts what it has sent, so it never waits for a replica's report. May be called from
    several threads.

    A replica costs what its requests hold (tokens computed less tokens evicted, a prompt counting
    from the start) plus the tokens of the new prompt that it has not seen.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, _Load] = {}
        self._seen: OrderedDict[bytes, set[str]] = OrderedDict()  # least recently used first
        self._clock = 0
        self._lock = Lock()

    def add(self, request_id: str, token_ids: Sequence[int] | IntArray) -> None:
        """A prompt that is to be sent; ``ended`` must follow."""
        columns = column_hashes(np.asarray(token_ids, np.int32), _COLUMN, [])
        with self._lock:
            self._requests[request_id] = _Request(columns, len(token_ids))

    def rank(self, request_id: str, replicas: Sequence[str]) -> list[str]:
        """``replicas``, which are all that run, best first; equal ones take turns.

        Those it knew and that are not among them are forgotten, their caches included.
        """
        with self._lock:
            for gone in self._loads.keys() - set(replicas):
                self._forget(gone)
            cached = self._cached(request_id)
            costs = {}
            for name in replicas:
                load = self._loads.setdefault(name, _Load())
                costs[name] = (load.held - cached.get(name, 0), load.chosen)
            return sorted(replicas, key=costs.__getitem__)

    def send(self, request_id: str, replica: str) -> None:
        """The request goes there; one that has ended in the meantime does not count."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.replica == replica:
                return
            self._withdraw(request)
            request.replica = replica
            load = self._loads.setdefault(replica, _Load())
            load.held += request.held
            self._clock += 1
            load.chosen = self._clock
            for digest in request.columns:
                self._seen.setdefault(digest, set()).add(replica)
                self._seen.move_to_end(digest)
            while len(self._seen) > _COLUMNS_KNOWN:
                self._seen.popitem(last=False)

    def holds(self, request_id: str, tokens: int) -> None:
        """The request's cache has grown, or shrunk, to ``tokens``."""
        with self._lock:
            request = self._requests[request_id]
            if request.replica is not None:
                self._loads[request.replica].held += tokens - request.held
            request.held = tokens

    def ended(self, request_id: str) -> None:
        with self._lock:
            self._withdraw(self._requests.pop(request_id))

    def forget_prefixes(self) -> None:
        """The prefix caches were emptied."""
        with self._lock:
            self._seen.clear()

    def load(self, replica: str) -> int:
        """Tokens that its requests hold."""
        with self._lock:
            return self._loads[replica].held if replica in self._loads else 0

    def _cached(self, request_id: str) -> dict[str, int]:
        """Leading tokens of the prompt that each replica has seen."""
        found: dict[str, int] = {}
        request = self._requests.get(request_id)
        matching = set(self._loads)
        for count, digest in enumerate(request.columns if request else (), 1):
            matching = matching & self._seen.get(digest, set())
            if not matching:
                break
            found |= dict.fromkeys(matching, count * _COLUMN)
        return found

    def _withdraw(self, request: _Request) -> None:
        if request.replica is not None:
            self._loads[request.replica].held -= request.held
            request.replica = None

    def _forget(self, replica: str) -> None:
        del self._loads[replica]
        for request in self._requests.values():
            if request.replica == replica:
                request.replica = None
        for holders in self._seen.values():
            holders.discard(replica)
