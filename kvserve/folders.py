"""Where temporary files go."""

from __future__ import annotations

import os
import tempfile


def temporary_folder() -> str:
    """``tempfile.gettempdir()``, but on a full disk too.

    ``gettempdir`` tests folders by writing a file; our sockets and empty folders need no room.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return os.environ.get("TMPDIR") or "/tmp"
