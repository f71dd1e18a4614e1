"""The processes of an engine beside the one that starts it: plain Pythons at the end of a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

_COMMAND = (
    "from kvserve.signals import leave_to_parent; leave_to_parent(); "  # also while it imports
    "from {module} import main; main()"
)


def start_child(module: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run ``main()`` of ``module`` in a process of its own; returns it with our end of a pipe,
    which reads an end of file once the process is gone.

    Not by multiprocessing: that runs the user's main module once more in each process, which
    therefore needs a guard, and at exit it waits for those that the user did not end.
    """
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND.format(module=module), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"},
        )
    return process, ours


def parents_end() -> Connection:
    """In such a process: its end of the pipe."""
    return Connection(int(sys.argv[1]))
