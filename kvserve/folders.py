"""Where temporary files go, and those that are kept; and where kvserve itself is."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path


def temporary_folder() -> str:
    """``tempfile.gettempdir()``, which works on a full disk too.

    ``gettempdir`` tests a folder by writing a file, so it raises on a full disk. We only create
    sockets and empty folders there, which need no space.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR") or "/tmp"


_LONGEST = 103
"""Bytes that the name of a socket may have everywhere."""


def scratch_folder(socket: str = "") -> tempfile.TemporaryDirectory[str]:
    """A new folder that goes with the object, with room for the name of a ``socket`` in it."""
    where = temporary_folder()
    longest = len(os.fsencode(where)) + len("/kvserve-12345678/") + len(socket)
    if socket and longest > _LONGEST:
        what = f"TMPDIR is too long: the name of a socket has at most {_LONGEST} bytes"
        raise OSError(errno.ENAMETOOLONG, what, where)
    return tempfile.TemporaryDirectory(prefix="kvserve-", dir=where)


def cache_folder() -> Path | None:
    """kvserve's in the user's cache, unless there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "kvserve") if os.path.isabs(cache) else None


def install(extra: str) -> str:
    """The command that installs an extra: kvserve is on no index, so it names the clone."""
    clone = Path(__file__).resolve().parents[1]
    place = clone if (clone / "pyproject.toml").exists() else "CLONE"
    return f"{sys.executable} -m pip install -e '{place}[{extra}]'"
