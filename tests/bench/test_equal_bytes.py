"""Policies compared at equal bytes, not at equal ratios."""

from __future__ import annotations

from typing import Any

import pytest

from bench.equal_bytes import at_equal_bytes, equal_bytes_table


def row(name: str, ratio: float | None, held: float, match: float) -> dict[str, Any]:
    fields = {"name": name} | ({} if ratio is None else {"ratio": ratio})
    return {"policy_args": fields, "mean_held_bytes": held * 1024, "exact_match": match}


ROWS = [
    row("none", None, 900, 1.0),
    *(row("kara", 0.2, 200, 0.5), row("kara", 0.4, 400, 0.9)),
    *(row("snapkv", 0.2, 100, 0.2), row("snapkv", 0.4, 300, 0.4)),
]


def test_lines_are_read_off_where_they_were_measured() -> None:
    sizes, (kara, snapkv) = at_equal_bytes(ROWS, points=2)
    assert [size / 1024 for size in sizes] == [200, 300]  # where both have been measured
    assert [kara["policy"], kara["at0"], kara["at1"]] == ["kara", 0.5, pytest.approx(0.7)]
    assert [snapkv["at0"], snapkv["at1"]] == pytest.approx([0.3, 0.4])
    more = [*ROWS, row("h2o", 0.2, 250, 0.1), row("h2o", 0.3, 500, 0.2)]
    table = equal_bytes_table(more)
    assert table is not None and "200 KiB" in table and "–" in table  # beyond h2o's points
