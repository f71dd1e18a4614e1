"""`kvserve bench latency`: iterations in turns, and vLLM's keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvserve.benchmarks.commands import latency
from kvserve.benchmarks.measuring.measure import Played
from kvserve.scheduler.speculation.speculation import Speculation
from tests.benchmarks.conftest import Bench

SMALL = (
    *("--input-len", "8", "--output-len", "24", "--batch-size", "3", "--kv-blocks", "60"),
    *("--num-iters", "4", "--num-iters-warmup", "1", "--block-size", "4"),
)
SPECULATION = (
    *("--compare-speculation", "--speculative-config"),
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}',
)
KARA = "kara:window=16,buffer=4,chunk_budget=2,period=4"


def test_iterations_of_all_policies(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = latency.play, []

    def noted(engine: Any, workload: Any) -> Played:
        played = real(engine, workload)
        seen.append(played.figures["prompt_cached"])
        played.figures["wall_s"] = float(len(seen))
        return played

    monkeypatch.setattr(latency, "play", noted)
    status, saved = bench("bench latency", *SMALL, "--policy", "none", "--policy", KARA)
    assert status == 0 and len(seen) == 10
    assert set(seen) == {0.0}
    none, kara = saved["rows"]
    assert none["latencies"] == [3.0, 5.0, 7.0, 9.0] and kara["latencies"] == [4.0, 6.0, 8.0, 10.0]
    assert none["avg_latency"] == 6.0 and kara["avg_latency_ms"] == 7000.0
    assert [*none["percentiles"]] == ["10", "25", "50", "75", "90", "99"]
    assert kara["percentiles"]["90"] == pytest.approx(np.percentile([4, 6, 8, 10], 90))
    assert kara["ratio_to_first"] == pytest.approx(np.median([4 / 3, 6 / 5, 8 / 7, 10 / 9]))
    assert none["compactions_per_request"] is None and kara["compactions_per_request"] > 0


def test_speculation_off_and_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights soon repeat themselves, which the lookup finds."""
    monkeypatch.setattr(Speculation, "enough", lambda *_: 0.0)
    flags = ("--policy", "none", "--output-len", "60", "--num-iters", "1")
    status, saved = bench("bench latency", *SMALL, *flags, *SPECULATION)
    off, on = saved["rows"]
    assert status == 0 and (off["speculation"], on["speculation"]) == ("off", "on")
    assert off["draft_tokens"] is off["accepted_share"] is None
    assert on["draft_tokens"] > 0 and 0 <= on["accepted_share"] <= 1
