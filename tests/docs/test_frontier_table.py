"""The README's table of a language model says what its result file says."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "bench/results/2026-11-27-frontier-smollm2.json"


def test_its_numbers_are_those_of_the_file() -> None:
    section = (ROOT / "README.md").read_text().partition("## On a language model")[2]
    lines = [line for line in section.partition("![")[0].splitlines() if line.startswith("| ")][1:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
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
