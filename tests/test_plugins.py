"""The tests start where pytest is alone: a machine that is lent for its GPU has no plugins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WAIT

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_pytest_alone_is_enough() -> None:
    """``--strict-config`` refuses settings of plugins that are not there."""
    without = [f"-pno:{name}" for name in ("asyncio", "timeout", "xdist", "cacheprovider")]
    target = "tests/kernels/test_pooling.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *without, "--collect-only", "-q", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
    assert "test_pooling" in done.stdout
