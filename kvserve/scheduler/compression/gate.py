"""Whether a compaction earns back what it costs, from what the last steps took.

A step takes ``a + c * batch + k * entries held``. An event costs the seconds its queries take to
score, once; every entry it evicts saves k seconds in each of the sequence's later steps, and
while requests wait for memory it also frees that share of the pool for other work.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray

_FORGET = 0.99
_STEPS_NEEDED = 32


class BreakEvenGate:
    """Learns the costs of steps and events; lets events pass until it knows both."""

    def __init__(self) -> None:
        self._steps = 0
        self._normal = np.zeros((3, 3))
        self._right = np.zeros(3)
        self._event_seconds = 0.0
        self._queries = 0.0

    def record_step(self, num_decoding: int, entries: int, seconds: float) -> None:
        """A step that only decoded: its batch, the entries it attended to, its duration."""
        x = np.array([1.0, num_decoding, entries])
        self._normal = _FORGET * self._normal + np.outer(x, x)
        self._right = _FORGET * self._right + x * seconds
        self._steps += 1

    def record_events(self, queries: int, seconds: float) -> None:
        """Events of one step: the queries they scored with, and their duration."""
        self._queries = _FORGET * self._queries + queries
        self._event_seconds = _FORGET * self._event_seconds + seconds

    def pays(
        self, evicted: IntArray, queries: IntArray, steps_left: IntArray, entries_that_fit: int
    ) -> IntArray:
        """Which events to let pass: bool [n].

        ``entries_that_fit``: how many entries the pool holds, or 0 if no request waits for room.
        """
        if self._steps < _STEPS_NEEDED or not self._queries:
            return np.ones(len(evicted), bool)
        # The ridge keeps the system solvable when the batch never changes.
        scale = np.diag(self._normal).clip(min=1e-12)
        fit = np.linalg.solve(self._normal + np.diag(1e-6 * scale), self._right)
        entry_seconds = max(float(fit[2]), 0.0)
        if entries_that_fit:
            mean = self._right[0] / self._normal[0, 0]
            entry_seconds += mean / entries_that_fit
        saved = entry_seconds * evicted * steps_left
        return np.asarray(saved >= queries * (self._event_seconds / self._queries))
