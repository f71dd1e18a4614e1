"""The tables of accuracy at equal bytes say what the results do."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.pages import ROOT


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_every_policy_at_as_many_bytes(page: str) -> None:
    """The first table: what the result has, and ratios that a calculator confirms."""
    result = json.loads((ROOT / "bench/results/2026-11-24-equal-bytes-turns.json").read_text())
    rows = {row["policy_args"]["name"]: row for row in result["rows"]}
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("| ")]
    found = {}
    for line in lines:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if name.split(",")[0] in rows and len(cells) == 4:
            found[name.split(",")[0]] = [
                [float(x.replace(",", "")) for x in re.findall(r"[\d,]*\.?\d+", cell)]
                for cell in cells
            ]
    assert found.keys() == rows.keys()
    for name, (right, speed, ratio, megabytes) in found.items():
        row, turns = rows[name], sorted(rows[name]["output_tok_s_all"])
        assert right == [round(x, 2) for x in (row["exact_match"], *row["interval_95"])]
        assert speed == [round(sum(turns) / len(turns)), *(round(turn) for turn in turns)]
        assert ratio == [round(speed[0] / found["none"][1][0], 2)]
        assert megabytes == [round(row["mean_held_bytes"] / 1e6, 2)]
