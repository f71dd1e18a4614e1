"""Polls /health from a process of its own, and prints the time taken and the status."""

from __future__ import annotations

import contextlib
import sys
import time

import httpx

PERIOD = 0.25


def main() -> None:
    """Argument: the URL. Prints a line per poll: when, how long it took, the status (0: none)."""
    with (
        contextlib.suppress(BrokenPipeError, KeyboardInterrupt),
        httpx.Client(timeout=30) as client,
    ):
        while True:
            started = time.monotonic()
            try:
                status = client.get(f"{sys.argv[1]}/health").status_code
            except httpx.HTTPError:
                status = 0
            took = time.monotonic() - started
            sys.stdout.write(f"{time.time():.3f} {took:.6f} {status}\n")
            sys.stdout.flush()
            time.sleep(max(PERIOD - took, 0.0))


if __name__ == "__main__":
    main()
