"""Single keys from a terminal, without waiting for a line."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def single_keys() -> Iterator[None]:
    """While it lasts, keys arrive one by one and are not shown. Nothing where that cannot be."""
    try:
        import termios
        import tty
    except ImportError:  # Windows
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def key_within(seconds: float) -> str:
    """The key that is pressed within this time, or nothing."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
