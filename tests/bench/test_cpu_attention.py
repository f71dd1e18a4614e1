"""The benchmark of attention's reading: each form is read, and compared with bfloat16."""

from __future__ import annotations

import argparse
import shutil

import pytest

from bench.cpu_attention import FORMS, Reading


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_each_form_is_read() -> None:
    which = {"heads": ["64x3"], "rows": ["16x2048"], "forms": list(FORMS)}
    args = argparse.Namespace(**which, mib=1, repeat=1, threads=1, disable_tqdm=True)
    reading = Reading(args)
    reading.measure()
    rows = {row["form"]: row for row in reading.report().rows}
    assert list(rows) == list(FORMS)
    assert rows["bfloat16"]["of_bfloat16"] == 1.0
    assert all(row["gb_s"] > 0 and row["sum_gb_s"] > 0 for row in rows.values())
