"""The soak itself, for three minutes: `make soak` runs it for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.soak.__main__ import slope
from bench.soak.malformed import malformed, raw
from bench.soak.report import Check


def test_the_same_seed_makes_the_same_request() -> None:
    assert malformed(17) == malformed(17) != malformed(18)
    assert [raw(seed) for seed in range(20)] == [raw(seed) for seed in range(20)]


def test_growth_is_a_slope() -> None:
    samples = [{"at_s": 60.0 * i, "engine_mib": 300 + 2.5 * i} for i in range(10)]
    assert slope(samples, "engine_mib") == pytest.approx(2.5)
    assert not Check("growth", 0.5, 2.5, "<=").holds


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_minutes_of_everything(tmp_path: Path) -> None:
    """Slopes and latencies want an hour and a machine of their own; the rest holds at any time."""
    result, page = tmp_path / "soak.json", tmp_path / "soak.md"
    command = [sys.executable, "-m", "bench.soak", "--minutes", "3"]
    command += ["--save-result", str(result), "--page", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert result.is_file(), done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert found["surprises"] == [] and found["fixed_request_other"] == [], done.stdout
    timed = ("p99", "growth")
    broken = [row for row in found["rows"] if not row["holds"]]
    assert not [row for row in broken if not row["check"].startswith(timed)], broken
    assert found["requests"] > 100 and found["streams_cut"] > 5
    assert {fault["fault"] for fault in found["faults"]} >= {"engine killed"}
    assert "| what | found | wanted |" in page.read_text()
