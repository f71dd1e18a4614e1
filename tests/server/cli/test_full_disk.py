"""A log that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_what_is_said_to_a_full_disk_ends_nothing() -> None:
    """The start-up table and errors go to stderr; a server must not end over them."""
    code = "from kvserve.log import say; say('a table\\n'); print('goes on')"
    with FULL.open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert (ended.returncode, ended.stdout) == (0, b"goes on\n")
