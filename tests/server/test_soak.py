"""The soak itself, for three minutes: `make soak` runs it for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_minutes_of_everything(tmp_path: Path) -> None:
    """Slopes and latencies want an hour and a machine of their own; the rest holds at any time."""
    result = tmp_path / "soak.json"
    command = [sys.executable, "-m", "bench.soak", "--minutes", "3"]
    command += ["--save-result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert result.is_file(), done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["surprises"] == [] and found["fixed_request_other"] == [], done.stdout
    timed = ("p99", "growth")
    broken = [row for row in found["rows"] if not row["holds"]]
    assert not [row for row in broken if not row["check"].startswith(timed)], broken
    assert found["requests"] > 100 and found["streams_cut"] > 5
    assert {fault["fault"] for fault in found["faults"]} >= {"engine killed"}
