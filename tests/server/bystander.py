"""A client that streams beside an attack, and notes how long it waits."""

from __future__ import annotations

import threading
import time

import httpx


class Bystander:
    """Streams one answer after another while the context lasts; ``longest_gap`` is in seconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.longest_gap = 0.0
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
        last = None
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code} {answer.read()!r}")
            for line in answer.iter_lines():
                if '"error"' in line:
                    self.failures.append(line)
                if not line.startswith("data:"):
                    continue
                now = time.monotonic()
                if last is not None:
                    self.longest_gap = max(self.longest_gap, now - last)
                last, self.chunks = now, self.chunks + 1
                if self._over.is_set():
                    return
