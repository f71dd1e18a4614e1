"""Chooses the replica for a request: the one whose requests hold the fewest tokens, unless another
has enough of the prompt in its prefix cache to make up for the difference.

This is plain counting, without Ray; `replicated_engine.py` uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.column_hash import column_hashes

_COLUMN = 64
"""Prompt tokens per hash: shared prefixes are known only in multiples of this."""

_COLUMNS_KNOWN = 2**17

_PREFILL = 4
"""Added weight of a prompt token that is still to be computed. Prompts wait for each other, and
computing a token takes much longer than reading a held one in a step. In a simulation 4 and 16 do
equally well; with 0 a replica that has just become free gets too many prompts at once."""


@dataclass(slots=True)
class _Request:
    """``columns``: hashes of the prompt. ``weight``: its load on ``replica``, once sent."""

    columns: list[bytes]
    prompt_len: int
    weight: int = 0
    replica: str | None = None


@dataclass(slots=True)
class _Load:
    """``weight``: weighted tokens of a replica's requests. ``chosen``: clock of the last choice."""

    weight: int = 0
    chosen: int = 0


class HeldTokenRouter:
    """Counts the requests that it has sent, so it never waits for a replica's report. Thread-safe.

    The cost of a replica is the number of tokens that its requests hold (evicted ones do not count,
    a whole prompt counts from the start; a prompt without a first token yet weighs more), plus the
    tokens of the new prompt that the replica has not seen.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, _Load] = {}
        self._seen: OrderedDict[bytes, set[str]] = OrderedDict()  # least recently used first
        self._clock = 0
        self._lock = Lock()

    def add(self, request_id: str, token_ids: Sequence[int] | IntArray) -> None:
        """Register a request before it is sent; ``ended`` must follow."""
        columns = column_hashes(np.asarray(token_ids, np.int32), _COLUMN, [])
        with self._lock:
            self._requests[request_id] = _Request(columns, len(token_ids))

    def rank(self, request_id: str, replicas: Sequence[str]) -> list[str]:
        """``replicas``, best first; of equal ones the one chosen longest ago comes first.

        ``replicas`` must be all that run: others are forgotten, with their prefix caches.
        """
        with self._lock:
            for gone in self._loads.keys() - set(replicas):
                self._forget(gone)
            cached = self._cached(request_id)
            costs = {}
            for name in replicas:
                load = self._loads.setdefault(name, _Load())
                costs[name] = (load.weight - cached.get(name, 0), load.chosen)
            return sorted(replicas, key=costs.__getitem__)

    def send(self, request_id: str, replica: str) -> None:
        """Count the request on ``replica``, unless the request has ended in the meantime."""
        with self._lock:
            request = self._requests.get(request_id)
            if request is None or request.replica == replica:
                return
            self._withdraw(request)
            new = request.prompt_len - self._cached(request_id).get(replica, 0)
            request.replica, request.weight = replica, request.prompt_len + _PREFILL * new
            load = self._loads.setdefault(replica, _Load())
            load.weight += request.weight
            self._clock += 1
            load.chosen = self._clock
            for digest in request.columns:
                self._seen.setdefault(digest, set()).add(replica)
                self._seen.move_to_end(digest)
            while len(self._seen) > _COLUMNS_KNOWN:
                self._seen.popitem(last=False)

    def holds(self, request_id: str, tokens: int) -> None:
        """Record that the request has its first token, and that its cache holds ``tokens``."""
        with self._lock:
            request = self._requests[request_id]
            if request.replica is not None:
                self._loads[request.replica].weight += tokens - request.weight
                request.weight = tokens

    def forget(self, request_id: str) -> None:
        with self._lock:
            self._withdraw(self._requests.pop(request_id))

    def forget_prefixes(self) -> None:
        """Record that all prefix caches were cleared."""
        with self._lock:
            self._seen.clear()

    def load(self, replica: str) -> int:
        """Weighted tokens of the replica's requests."""
        with self._lock:
            return self._loads[replica].weight if replica in self._loads else 0

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
            self._loads[request.replica].weight -= request.weight
            request.replica = None

    def _forget(self, replica: str) -> None:
        del self._loads[replica]
        for request in self._requests.values():
            if request.replica == replica:
                request.replica = None
        for holders in self._seen.values():
            holders.discard(replica)
