"""A server in a process of its own: its child processes, their memory, and requests to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

FIXED = {"prompt": "Hello there", "max_tokens": 24, "temperature": 0, "return_token_ids": True}


class Served:
    """``kvserve`` with ``flags``; ``start`` waits until it serves."""

    def __init__(self, flags: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.flags = [*flags, "--port", "0"]
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})}
        self.lines: list[str] = []
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self, seconds: float = 1200.0) -> None:
        self.lines.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvserve", *self.flags],
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=self.env,
        )
        assert self._process.stderr is not None
        lines = iter(self._process.stderr.readline, "")
        threading.Thread(target=self.lines.extend, args=(lines,), daemon=True).start()
        deadline = time.monotonic() + seconds
        while (found := re.search(r"http://[^\s]+", self.text)) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.text[-3000:]}")
            time.sleep(0.1)
        self.url = found[0]

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def children(self) -> list[int]:
        """Child processes of the server's; the engine, which is the largest, comes first."""
        pid = self.process.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sorted(map(int, below), key=resident, reverse=True)

    @property
    def engine(self) -> int:
        return self.children[0]

    def descriptors(self) -> int:
        return sum(_descriptors(pid) for pid in (self.process.pid, self.engine))

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/v1/kv/stats", timeout=60).json()
        return found

    def idle(self, seconds: float) -> bool:
        """Whether, within ``seconds``, all blocks are free or cached and no request is left."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.stats()
            back = stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
            if back and not stats["requests"]:
                return True
            time.sleep(0.2)
        return False

    def fixed_tokens(self) -> list[int]:
        """Tokens of the fixed request."""
        answer = httpx.post(f"{self.url}/v1/completions", json=FIXED, timeout=300)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def stop(self, seconds: float = 60.0) -> int:
        """SIGTERM; returns the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def resident(pid: int) -> float:
    """Resident MiB of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
