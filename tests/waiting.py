"""How long a test waits: until what it waits for is so, or until whoever would do it has ended."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

WAIT = 240.0
"""Seconds. The one bound of all waits, far above what any takes on a busy machine."""


async def until(condition: Callable[[], bool]) -> None:
    """``wait_until`` beside an event loop that goes on."""

    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(look(), WAIT)


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Return once ``condition`` holds. Raises if ``process`` ends before."""
    deadline = time.monotonic() + WAIT
    while not condition():
        ended = process is not None and process.poll() is not None
        # What it did last may be seen only now.
        assert not ended or condition(), f"the process ended with {process and process.returncode}"
        assert time.monotonic() < deadline, f"not so after {WAIT:g} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """A process that nobody has waited for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
