"""The soak itself, for three minutes: `make soak` runs it for an hour."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.soak.__main__ import growth
from bench.soak.mixed import MixedAttacks
from bench.soak.report import Check


def test_growth_is_between_the_ends() -> None:
    """An attack's seconds in between are none."""
    samples = [{"engine_mib": 300.0 + 2 * i + 500 * (i == 18)} for i in range(20)]
    assert growth(samples, "engine_mib") == pytest.approx(33)
    assert not growth([], "engine_mib")
    assert not Check("growth", 16.0, 33.0, "<=").holds


def test_mixed_attacks_note_what_is_no_answer(nobody: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 5xx or a broken connection, unless a fault excuses it."""
    excused = False
    mixed = MixedAttacks(2048, lambda: excused)
    mixed.url = nobody

    def statuses(url: str) -> Iterator[int]:
        yield from (200, 400, 500)

    monkeypatch.setitem(mixed._attacks, "mixed", statuses)
    mixed._attack("mixed")
    mixed._attack("half-sent requests")
    assert mixed.wrong[0] == "mixed: 500"
    assert mixed.wrong[1].startswith("half-sent requests: ConnectionRefusedError")
    excused = True
    mixed._attack("mixed")
    assert len(mixed.wrong) == 2
    assert mixed.answers["mixed"] == {"200": 2, "400": 2, "500": 2}


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
