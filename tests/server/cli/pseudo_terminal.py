"""A command of ours at a pseudo-terminal: what it shows, keys, and how it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from types import TracebackType

from tests.waiting import WAIT, wait_until


class Pty:
    """``kvserve ARGV`` at a terminal of 80 x 24 characters."""

    def __init__(self, *argv: str, rows: int = 24, columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvserve", *argv],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)},
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self._ours, 65536):
                self.shown += data.decode(errors="replace")

    def __enter__(self) -> Pty:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT)
        os.close(self._ours)

    def wait_for(self, text: str) -> None:
        """Wait until ``text`` is shown; what was shown up to it counts no more."""
        wait_until(lambda: text in self.shown or self.process.poll() is not None)
        assert text in self.shown, self.shown
        self.shown = self.shown.partition(text)[2]

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def ended(self) -> int:
        return self.process.wait(WAIT)
