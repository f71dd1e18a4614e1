"""`kvserve bench policies`: events of all sequences at once, beside a decode step."""

from __future__ import annotations

import pytest

from tests.benchmarks.conftest import Bench

KARA = "kara:window=16,buffer=4,chunk_budget=2,period=4"
SMALL = ("--num-seqs", "1", "3", "--input-len", "24", "--output-len", "40")


def test_events_stand_beside_decode_steps(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("--policy", "none", "--policy", KARA, "--policy", "snapkv:budget=30,window=8")
    status, saved = bench("bench policies", *SMALL, *policies)
    assert status == 0 and saved["complete"]
    rows = {(row["policy_args"]["name"], row["sequences"]): row for row in saved["rows"]}
    assert len(rows) == 6
    for (name, _), row in rows.items():
        assert row["decode_step_ms"] > 0
        if name == "kara":
            assert row["events_per_sequence"] == 2  # 16 tokens are pending after 16 and 28 steps
            assert row["event_per_step"] == pytest.approx(row["event_ms"] / row["decode_step_ms"])
            assert 0 < row["share_of_time"] < 1
        else:
            assert row["event_ms"] is None and row["share_of_time"] == 0
    out = capsys.readouterr().out
    assert "snapkv:budget=30,window=8: no step had the events of all 3 sequences" in out
    assert "none: no step" not in out
