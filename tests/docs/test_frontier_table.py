"""The tables of a language model say what their result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench/results/2026-11-27-frontier-smollm2.json"


README = {
    "full cache": ("none", "auto"),
    "`k8v4`": ("none", "k8v4"),
    "`chunkkv` in `k8v4`": ("chunkkv", "k8v4"),
    "`kara`, ratio .1, in `k8v4`": ("kara:ratio=0.1", "k8v4"),
    "vLLM, `fp8`": ("vLLM", "fp8"),
}


def table_of(page: str) -> tuple[str, list[list[str]]]:
    """The section on a language model, and the cells of its table."""
    section = (ROOT / page).read_text().partition("## On a language model")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return section, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readmes_rows_are_those_of_the_file() -> None:
    _, table = table_of("README.md")
    assert [cells[0] for cells in table] == list(README)
    rows = json.loads(FILE.read_text())["rows"]
    found = {
        (name, row["kv_cache_dtype"]): row
        for row in rows
        for name in (row["policy"].partition(":")[0], row["policy"])
    }
    for name, size, kl, facts, speed in table:
        row = found[README[name]]
        assert (float(size), float(kl)) == (round(row["of_full"], 2), round(row["kl"], 3))
        assert facts == "" if row["facts"] is None else float(facts) == round(row["facts"], 2)
        assert float(speed) == round(row["ratio_to_first"], 2)


def test_its_numbers_are_those_of_the_file() -> None:
    section, table = table_of("docs/benchmarks.md")
    document = json.loads(FILE.read_text())
    found = document["rows"]
    assert document["complete"] and len(table) == len(found) == 16
    for row, (policy, dtype, size, kl, facts, speed) in zip(found, table, strict=True):
        assert policy.partition(",")[0] == row["policy"].partition(":")[0]
        ratio = re.search(r"ratio=([\d.]+)", row["policy"])
        held = float(ratio[1]) if ratio else 0.3 if row["policy"] == "kara" else None
        said = re.search(r"ratio (\S+)", policy)
        assert (float(said[1]) if said else None) == held
        assert dtype.replace("bfloat16", "auto") == row["kv_cache_dtype"]
        assert float(size) == round(row["of_full"], 2)
        assert facts == "" if row["facts"] is None else float(facts) == round(row["facts"], 2)
        mean, _, error = kl.partition(" ± ")
        assert float(mean) == round(row["kl"], 3)
        assert not error or float(error) == round(row["kl_error"], 4)
        assert float(speed) == round(row["ratio_to_first"], 2)
    others = json.loads((FILE.parent / "2026-11-26-frontier-streaming-k8v4.json").read_text())
    rows = {row["policy"].partition(":")[0]: row for row in others["rows"]}
    said = re.search(r"eight other pieces (\S+) ± (\S+) beside (\S+) ± ([\d.]+)", section)
    assert said is not None
    pair = rows["streaming_llm"], rows["kara"]
    measured = (row[key] for row in pair for key in ("kl", "kl_error"))
    assert list(map(float, said.groups())) == [round(value, 3) for value in measured]
