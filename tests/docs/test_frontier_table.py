"""The README's table of a language model says what its two result files say."""

from __future__ import annotations

from pathlib import Path

from bench.frontier import of_files

ROOT = Path(__file__).parents[2]


def test_its_numbers_are_those_of_the_files() -> None:
    section = (ROOT / "README.md").read_text().partition("## On a language model")[2]
    lines = [line for line in section.partition("![")[0].splitlines() if line.startswith("| ")][1:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    name = "bench/results/2026-11-26-frontier-{}-smollm2.json"
    found = of_files(*(ROOT / name.format(kind) for kind in ("fidelity", "speed")))
    assert len(table) == len(found) == 12
    for row, (policy, dtype, size, kl, facts, speed) in zip(found, table, strict=True):
        key = policy.replace(", ratio .", ":ratio=0."), dtype.replace("bfloat16", "auto")
        assert key == (row["policy"], row["kv_cache_dtype"])
        assert float(size) == round(row["of_full"], 2)
        assert float(facts) == round(row["facts"], 2)
        mean, _, error = kl.partition(" ± ")
        assert float(mean) == round(row["kl"], 3)
        assert not error or float(error) == round(row["kl_error"], 4)
        assert bool(speed) == (row["ratio_to_first"] is not None) == (dtype != "k4v4")
        if speed:
            assert float(speed) == round(row["ratio_to_first"], 2)
