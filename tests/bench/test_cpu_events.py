"""The benchmark of an event's parts: each is run on every row of a small pool."""

from __future__ import annotations

import argparse

from bench.cpu_events import Events


def test_each_part_is_measured() -> None:
    which = {"heads": ["32x2"], "dtypes": ["bfloat16"]}
    events = Events(argparse.Namespace(**which, mib=1, repeat=1, threads=1, disable_tqdm=True))
    events.measure()
    rows = events.report().rows
    assert [row["part"] for row in rows] == ["gather keys", "score a window", "move half"]
    assert all(row["ms"] > 0 and row["of_copy"] > 0 for row in rows)
    assert [row["gflop_s"] is None for row in rows] == [True, False, True]
