"""The benchmark of a CPU's parts: every part is measured on a small case."""

from __future__ import annotations

import pytest

from bench.cpu_attention import FORMS, CpuSpeed, make_parser

EVENTS = ["gather keys", "gather values", "score a window", "move half", "all"]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("flags", "key", "names", "figures"),
    [
        ("--heads 64x3 --rows 16x2048", "form", [*FORMS], ["gb_s", "sum_gb_s", "of_bfloat16"]),
        (
            *("--part events --heads 32x2 --forms bfloat16 k4v4", "part", 2 * EVENTS),
            ["ms", "of_copy", "times_bfloat16"],
        ),
        (
            *("--part products --shapes 4m --dtypes float32 --tokens 1 4", "tokens", [1, 4]),
            ["compiled_ms", "vs_torch"],
        ),
    ],
)
def test_each_part_is_measured(
    flags: str, key: str, names: list[object], figures: list[str]
) -> None:
    small = ["--mib", "1", "--repeat", "1", "--disable-tqdm"]
    speed = CpuSpeed(make_parser().parse_args([*small, *flags.split()]))
    speed.measure()
    rows = speed.report().rows
    assert [row[key] for row in rows] == names
    assert all(row[figure] > 0 for row in rows for figure in figures)
