"""A client that streams beside an attack, and notes how long the server lets it wait.

What other programs take is no fault of the server: the time for which its threads were ready to
run and got no CPU is subtracted. So a bound holds on a busy machine too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx


class Bystander:
    """Streams one answer after another while the context lasts; ``longest_gap`` is in seconds.

    ``pids``: the server and its engine. ``longest_wait`` has the waits for a CPU too.
    """

    def __init__(self, url: str, pids: Sequence[int] = ()) -> None:
        self._url = url
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest_gap = self.longest_wait = 0.0
        self.chunks = 0
        self.failures: list[str] = []

    def __enter__(self) -> Bystander:
        self._thread.start()
        while not self.chunks and not self.failures:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._over.is_set():
                self._stream(http)

    def _stream(self, http: httpx.Client) -> None:
        body = {"prompt": "Once upon", "max_tokens": 400, "stream": True, "ignore_eos": True}
        last, waited = None, 0.0
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code} {answer.read()!r}")
            for line in answer.iter_lines():
                if '"error"' in line:
                    self.failures.append(line)
                if not line.startswith("data:"):
                    continue
                now, before = time.monotonic(), waited
                waited = sum(map(_waited, self._pids))
                if last is not None:
                    self.longest_wait = max(self.longest_wait, now - last)
                    self.longest_gap = max(self.longest_gap, now - last - (waited - before))
                last, self.chunks = now, self.chunks + 1
                if self._over.is_set():
                    return


def _waited(pid: int) -> float:
    """Seconds for which threads of a process were ready to run, and had no CPU.

    Of all threads: the one that has the interpreter lock makes the others wait with it.
    """
    seconds = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            seconds += int(file.read_text().split()[1]) / 1e9
    return seconds
