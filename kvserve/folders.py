"""Where temporary files go."""

from __future__ import annotations

import os
import tempfile


def temporary_folder() -> str:
    """``tempfile.gettempdir()``, on a full disk too.

    That one tries folders by writing a file; sockets and empty folders need no room.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR") or "/tmp"
