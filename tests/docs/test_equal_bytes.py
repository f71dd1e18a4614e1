"""The tables of accuracy at equal bytes say what the results do."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.docs.pages import ROOT

RESULTS = "bench/results/2026-11-24-triattention"
PAGE = (ROOT / "docs/benchmarks.md").read_text()
NAMES = {"full cache": "none", "snapkv:trigger=threshold": "snapkv"}


def measured(name: str) -> dict[tuple[str, str], Any]:
    """The rows of a result, by task and policy; budgets that hold Kara's bytes."""
    rows = json.loads((ROOT / f"{RESULTS}-{name}.json").read_text())["rows"]
    found = {(row["task"], row["policy_args"]["name"]): row for row in rows}
    for (task, policy), row in found.items():
        if policy != "none":
            kara = found[task, "kara"]["mean_held_bytes"]
            assert row["mean_held_bytes"] == pytest.approx(kara, rel=0.012)
    return found


def table(page: str, header: str) -> dict[str, list[list[float]]]:
    """The numbers in each cell of the first table behind ``header``, by policy."""
    (text,) = (ROOT / page).read_text().split(header)[1:]
    rows = {}
    for line in text.strip().split("\n\n")[0].splitlines()[1:]:
        first, *cells = (cell.strip("` *") for cell in line.strip("|").split("|"))
        cells = [re.sub(r"\(.*", "", cell) for cell in cells]
        rows[NAMES.get(first, first)] = [
            [float(x) for x in re.findall(r"[\d.]*\.\d+", cell)] for cell in cells
        ]
    return rows


LONG = [(f"long-chain-{length}", f"long-chain-{length}") for length in (1000, 2000, 4000)]


def test_long_chains() -> None:
    results = {task: measured(name) for name, task in LONG}
    page = table("docs/triattention.md", "| | 1,000 | 2,000 | 4,000 |\n")
    assert len(page) == 5
    for policy, cells in page.items():
        for (_, task), cell in zip(LONG, cells, strict=True):
            assert cell == [round(results[task][task, policy]["exact_match"] + 1e-9, 2)]


def numbers(cell: str) -> list[float]:
    return [float(x.replace(",", "")) for x in re.findall(r"[\d,]*\.?\d+", cell)]


def as_told(row: Any, none: list[list[float]]) -> list[list[float]]:
    """Right answers, tokens a second, their ratio to those of ``none``, as the page has these, and
    megabytes."""
    turns = sorted(row["output_tok_s_all"])
    mean = round(sum(turns) / len(turns))
    return [
        [round(x, 2) for x in (row["exact_match"], *row["interval_95"])],
        [mean, *map(round, turns)],
        [round(mean / none[1][0], 2)],
        [round(row["mean_held_bytes"] / 1e6, 2)],
    ]


def test_every_policy_at_as_many_bytes() -> None:
    result = json.loads((ROOT / "bench/results/2026-11-24-equal-bytes-turns.json").read_text())
    rows = {row["policy_args"]["name"]: row for row in result["rows"]}
    page = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    named = [(name.strip().split(",")[0], cells) for name, *cells in page if len(cells) == 4]
    found = {name: list(map(numbers, cells)) for name, cells in named if name in rows}
    assert found.keys() == rows.keys()
    for name, told in found.items():
        assert told == as_told(rows[name], found["none"])


def test_graded_chains_in_fewer_bits() -> None:
    """The page's table, row for row, and what a calculator makes of it."""
    result = json.loads((ROOT / "bench/results/2026-11-27-graded-bits.json").read_text())
    rows = {(row["policy_args"]["name"], "ratio" in row["policy_args"], row["kv_cache_dtype"]): row
            for row in result["rows"]}  # fmt: skip
    head = "| policy | entries in | right answers"
    text = PAGE.partition(head)[2].partition("\n\n")[0]
    seen = {}
    for line in text.splitlines()[2:]:
        name, dtype, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        key = name.split(",")[0], "ratio" in name, dtype.replace("float32", "auto")
        seen[key] = [numbers(cell) for cell in cells]
        assert seen[key] == as_told(rows[key], seen["none", False, "auto"])
    assert seen.keys() == rows.keys()
    full, default = (f"{seen[key][3][0]:.2f}".removeprefix("0") for key in (
        ("none", False, "k8v4"), ("kara", False, "k8v4")))  # fmt: skip
    assert full == default, "or Kara's default saves bytes: say so"
    said = f"weighs what it drops: {default} MB a sequence with and without it"
    assert said in (ROOT / "docs/choose-a-policy.md").read_text()


def test_where_each_wins() -> None:
    for length in (500, 1000, 3000):
        result = json.loads((ROOT / f"bench/results/2026-11-27-grid-{length}.json").read_text())
        ratios = {(row["pool_share"], row["policy_args"]["name"]): row["ratio_to_first"]
                  for row in result["rows"] if row["kv_cache_dtype"] == "k8v4"}  # fmt: skip
        (line,) = re.findall(rf"^\| {length:,} \| (.*) \|$", PAGE, re.M)
        for share, cell in zip((0.125, 0.25, 0.5, 1.0), line.split(" | "), strict=True):
            named = ("none", "kara", "streaming_llm")
            assert numbers(cell) == [round(ratios[share, name], 2) for name in named]
    result = json.loads((ROOT / "bench/results/2026-11-27-grid-12000.json").read_text())
    none, full, fewest, kara, tenth = (f"{row['ratio_to_first']:.2f}" for row in result["rows"])
    said = f"`k8v4` {full}, in `k4v4` {fewest}, Kara in `k8v4` {kara}, at `ratio` .1 {tenth}."
    assert none == "1.00" and said in PAGE.replace("\n", " ")


def test_vllm_beside_graded_chains() -> None:
    result = json.loads((ROOT / "bench/results/2026-11-27-graded-peers.json").read_text())
    rows = [row["output_tok_s_all"] for row in result["rows"]]
    lines = [line for line in PAGE.splitlines() if line.startswith(("| graded,", "| the same"))]
    for line, (own, other) in zip(lines, ((0, 4), (2, 4), (1, 5), (3, 5)), strict=True):
        _, ours, theirs, _, ratio = (cell.strip() for cell in line.strip("|").split("|"))
        ratios = sorted(a / b for a, b in zip(rows[own], rows[other], strict=True))
        assert [*numbers(ours), *numbers(theirs)] == [
            round(sorted(rows[i])[1]) for i in (own, other)
        ]
        assert numbers(ratio) == [round(ratios[i], 2) for i in (1, 0, 2)]


REAL = {
    "full cache": ("none", "none"),
    "`buffer=32,ratio=0.1,remainder=off`": (
        "kara:remainder=off",
        "kara:buffer=32,ratio=0.1,remainder=off",
    ),
    "`buffer=32,ratio=0.1,remainder=fitted`: default until 2026-11-26": ("kara", "kara"),
    "`buffer=32,ratio=0.1,remainder=mean`": ("kara:remainder=mean", "kara:remainder=mean"),
    "`streaming_llm`, 830 entries": ("streaming_llm:period=32,budget=830",) * 2,
    "**default**: `buffer=128,ratio=0.3,remainder=mean`": (
        "kara:remainder=mean,buffer=128,ratio=0.3",
    )
    * 2,
}
"""The table's rows, and what they were called when they were measured."""


def test_real_text() -> None:
    """KL, its standard error and the facts found, in each cell."""
    header = "GSM8K's text |\n|---|---:|---:|---:|---:|\n"
    text, *_ = (ROOT / "docs/remainders.md").read_text().split(header)[1:]
    lines = [line.strip("|").split("|") for line in text.split("\n\n")[0].splitlines()]
    assert [cells[0].strip() for cells in lines] == list(REAL)
    found: dict[tuple[str, str], Any] = {}
    for name in (
        *("docs", "docs-default", "docs-rows", "docs-match-rows"),
        *("code", "code-rows", "gsm8k", "gsm8k-rows"),
    ):
        path = ROOT / f"bench/results/2026-11-26-fidelity-smollm2-{name}.json"
        for row in json.loads(path.read_text())["rows"]:
            found.setdefault((name.partition("-")[0], row["policy"]), row)
    for (title, (docs, others)), cells in zip(REAL.items(), lines, strict=True):
        for kind, cell in zip(("docs", "code", "gsm8k"), cells[2:], strict=True):
            policy = docs if kind == "docs" else others
            said = [float(x) for x in re.findall(r"\d*\.?\d+", cell)]
            if policy is None:
                assert not said, title
                continue
            row = found[kind, policy]
            shown = [row["kl"], row["kl_error"], row["facts"]] if row["kl"] else [0, row["facts"]]
            digits = [*[3] * (len(shown) - 1), 2]
            rounded = [round(x + 1e-9, n) for x, n in zip(shown, digits, strict=True)]
            assert said == rounded and row["n"] == 8, (title, kind)
