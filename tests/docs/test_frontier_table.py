"""The README's table of a language model says what its two result files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def rows(kind: str) -> dict[tuple[str, str], Any]:
    file = ROOT / "bench" / "results" / f"2026-11-26-frontier-{kind}-smollm2.json"
    return {
        (row["policy"], row["kv_cache_dtype"]): row for row in json.loads(file.read_text())["rows"]
    }


def test_its_numbers_are_those_of_the_files() -> None:
    section = (ROOT / "README.md").read_text().partition("## On a language model")[2]
    lines = [line for line in section.partition("![")[0].splitlines() if line.startswith("| ")][1:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found, speeds = rows("fidelity"), rows("speed")
    assert len(table) == len(found) == 12
    base = speeds["none", "auto"]["output_tok_s"]
    for (key, row), (policy, dtype, size, kl, facts, speed) in zip(
        found.items(), table, strict=True
    ):
        assert key == (policy.replace(", ratio .", ":ratio=0."), dtype.replace("bfloat16", "auto"))
        assert float(size) == round(row["of_full"], 2)
        assert float(facts) == round(row["facts"], 2)
        mean, _, error = kl.partition(" ± ")
        assert float(mean) == round(row["kl"], 3)
        assert not error or float(error) == round(row["kl_error"], 4)
        key = policy.replace("kara, ratio .1", "kara").replace(", ratio .", ":ratio=0."), key[1]
        assert bool(speed) == (key in speeds)
        if speed:
            assert float(speed) == round(speeds[key]["output_tok_s"] / base, 2)
