"""The benchmark of a CPU's parts: every part is measured on a small case."""

from __future__ import annotations

from typing import Any

import pytest

from bench.cpu_attention import FORMS, CpuSpeed, make_parser


def rows(*flags: str) -> list[Any]:
    small = ("--mib", "1", "--repeat", "1", "--disable-tqdm")
    speed = CpuSpeed(make_parser().parse_args([*small, *flags]))
    speed.measure()
    return list(speed.report().rows)


@pytest.mark.compiler
def test_each_form_is_read() -> None:
    found = {row["form"]: row for row in rows("--heads", "64x3", "--rows", "16x2048")}
    assert list(found) == list(FORMS)
    assert found["bfloat16"]["of_bfloat16"] == 1.0
    assert all(row["gb_s"] > 0 and row["sum_gb_s"] > 0 for row in found.values())


@pytest.mark.compiler
def test_each_part_of_an_event_is_measured() -> None:
    found = rows("--part", "events", "--heads", "32x2", "--forms", "bfloat16", "k4v4")
    parts = ["gather keys", "gather values", "score a window", "move half", "all"]
    assert [row["part"] for row in found] == 2 * parts
    assert all(row["ms"] > 0 and row["of_copy"] > 0 for row in found)
    assert [row["gflop_s"] is None for row in found[:5]] == [True, True, False, True, True]
    plain = {row["part"]: row["ms"] for row in found[:5]}
    for row in found:
        assert row["times_bfloat16"] == row["ms"] / plain[row["part"]]


@pytest.mark.compiler
def test_each_product_is_measured() -> None:
    flags = ("--part", "products", "--shapes", "4m", "--dtypes", "float32", "--tokens", "1", "4")
    found = rows(*flags)
    assert [row["tokens"] for row in found] == [1, 4]
    assert all(row["compiled_ms"] > 0 and row["vs_torch"] > 0 for row in found)
