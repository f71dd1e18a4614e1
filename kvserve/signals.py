"""Which signals end a server in order, and who of its processes heeds them."""

from __future__ import annotations

import signal

TO_ALL = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("INT", "HUP", "QUIT", "USR1", "USR2")
    if hasattr(signal, f"SIG{name}")
)
"""What a terminal or a script sends to all processes of a group at once."""
ENDING = (
    signal.SIGTERM,
    *TO_ALL,
    *(
        getattr(signal, f"SIG{name}")
        for name in ("ALRM", "VTALRM", "PROF", "XCPU", "PWR", "POLL", "STKFLT")
        if hasattr(signal, f"SIG{name}")
    ),
)
"""What ends a process that does not say otherwise, and can be caught."""
AT_ONCE = frozenset((signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGQUIT", signal.SIGINT)))
"""Of which the second one means haste. A terminal that closes sends SIGHUP twice."""


def leave_to_parent() -> None:
    """Ignore what a terminal sends to all: this process's parent heeds it, and may want to
    drain."""
    for number in TO_ALL:
        signal.signal(number, signal.SIG_IGN)


def heeded() -> list[signal.Signals]:
    """The ``ENDING`` ones but those that this process was told to ignore (`nohup`). A shell tells a
    job in the background to ignore SIGINT, and means the terminal's."""
    always = signal.SIGINT, signal.SIGTERM
    return [n for n in ENDING if n in always or signal.getsignal(n) is not signal.SIG_IGN]
