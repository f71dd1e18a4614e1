"""The tables of a language model say what their result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"
FILE = RESULTS / "2026-11-28-frontier-smollm2.json"
OTHERS = RESULTS / "2026-11-27-frontier-smollm2.json"


README = {
    "full cache": ("none", "auto"),
    "`k8v4`": ("none", "k8v4"),
    "`3bit`": ("none", "3bit"),
    "`keydiff` with a rest, in `3bit`": ("keydiff", "3bit"),
    "`chunkkv` in `k8v4`": ("chunkkv", "k8v4"),
    "`kara`, ratio .1, in `k8v4`": ("kara:ratio=0.1", "k8v4"),
}


def table_of(page: str) -> tuple[str, list[list[str]]]:
    """The section on a language model, and the cells of its table."""
    section = (ROOT / page).read_text().partition("## On a language model")[2].partition("\n## ")[0]
    first = section.partition("\n| ")[2].partition("\n\n")[0].splitlines()[2:]
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line).strip("|") for line in first]
    return section, [[cell.strip() for cell in line.split("|")] for line in plain]


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
    assert document["complete"] and len(table) == len(found) == 15
    for row, (policy, dtype, size, kl, facts, speed) in zip(found, table, strict=True):
        assert policy.partition(",")[0] == row["policy"].partition(":")[0]
        ratio = re.search(r"ratio=([\d.]+)", row["policy"])
        held = float(ratio[1]) if ratio else 0.3 if row["policy"].startswith("kara") else None
        kept = re.search(r"ratio ([\d.]+)", policy)
        assert (float(kept[1]) if kept else None) == held
        assert dtype.replace("bfloat16", "auto") == row["kv_cache_dtype"]
        assert float(size) == round(row["of_full"], 2)
        assert facts == "" if row["facts"] is None else float(facts) == round(row["facts"], 2)
        mean, _, error = kl.partition(" ± ")
        assert float(mean) == round(row["kl"], 3)
        assert not error or float(error) == round(row["kl_error"], 4)
        assert float(speed) == round(row["ratio_to_first"], 2)
    engines = section.rpartition("| engine |")[2].partition("\n\n")[0].splitlines()[2:]
    known = [row for row in json.loads(OTHERS.read_text())["rows"] if not row["policy_args"]]
    for row, line in zip(known, engines, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:2] == [row["policy"], row["kv_cache_dtype"]]
        numbers = row["of_full"], row["kl"], row["ratio_to_first"]
        said = (float(cell.partition(" ± ")[0]) for cell in cells[2:])
        assert list(said) == [round(x, n) for x, n in zip(numbers, (2, 3, 2), strict=True)]
    others = json.loads((RESULTS / "2026-11-26-frontier-streaming-k8v4.json").read_text())
    rows = {row["policy"].partition(":")[0]: row for row in others["rows"]}
    pieces = re.search(r"eight other pieces (\S+) ± (\S+) beside (\S+) ± ([\d.]+)", section)
    assert pieces is not None
    pair = rows["streaming_llm"], rows["kara"]
    measured = (row[key] for row in pair for key in ("kl", "kl_error"))
    assert list(map(float, pieces.groups())) == [round(value, 3) for value in measured]
