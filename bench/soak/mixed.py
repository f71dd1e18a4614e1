"""Attacks one after the other beside the traffic of a soak, and what became of them."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable

import httpx

from bench.soak.attacks import attacks
from bench.soak.traffic import causes

_PAUSE = 5.0


class MixedAttacks:
    """``url`` is where they go, empty while no server is there. ``excused``: a fault is going on
    that may fail any request."""

    def __init__(self, context: int, excused: Callable[[], bool]) -> None:
        self.url = ""
        self.answers: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[str] = []
        self._attacks = attacks(context)
        self._excused = excused
        self._over = threading.Event()

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        """Attack until ``stop``; for a thread."""
        while not self._over.is_set():
            for name in self._attacks:
                if self.url and not self._over.is_set():
                    self._attack(name)
                self._over.wait(_PAUSE)

    def _attack(self, name: str) -> None:
        url = self.url
        try:
            for status in map(str, self._attacks[name](url)):
                self.answers[name][status] += 1
                if status.startswith("5") and not self._excused():
                    self.wrong.append(f"{name}: {status}")
        except (httpx.HTTPError, OSError) as error:
            if not self._excused() and self.url == url:
                self.wrong.append(f"{name}: {causes(error)}")
