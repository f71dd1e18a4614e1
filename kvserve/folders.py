"""Where temporary files go."""

from __future__ import annotations

import os
import tempfile


def temporary_folder() -> str:
    """``tempfile.gettempdir()``, which works on a full disk too.

    ``gettempdir`` tests a folder by writing a file, so it raises on a full disk. We only create
    sockets and empty folders there, which need no space.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR") or "/tmp"
