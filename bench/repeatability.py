"""Runs a row of the suite several times: is accuracy identical, and how far do ratios spread?

    python -m bench.repeatability quarter-pool --save-result bench/results/DATE-repeatability.json

Decisions (answers, events, tokens held) have to be the same in every run; a ratio of throughputs
may spread by 5 % of its median. The exit status says whether both hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from kvserve.benchmarks.reports.report import Column, Report, Row, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least

_DECIDED = (
    *("output_tokens", "exact", "exact_match", "correct_prefix", "score"),
    *("held_entries_at_end", "held_over_logical_at_end", "compactions", "evicted_tokens"),
    *("compactions_per_request", "grid"),
)
_NAMES = ("task", "pool_blocks", "max_num_seqs", "prefix_caching", "policy")
_RATIOS = ("ratio_to_first", "ratio_to_none")
_LIMIT = 0.05
COLUMNS = (
    Column("row", "label", left=True),
    Column("exact match", "exact_match", ".3f"),
    Column("decisions", "decisions", left=True),
    Column("ratio", "ratio", ".3f"),
    Column("of all runs", "ratios", lambda all_: ", ".join(f"{ratio:.3f}" for ratio in all_)),
    Column("spread", "spread", ".1%"),
)


class Repeatability:
    """Repeated runs of one row's command."""

    def __init__(self, args: argparse.Namespace, command: Sequence[str]) -> None:
        self._args = args
        self._command = command
        self._runs: list[list[Row]] = []

    def measure(self) -> None:
        silent = True if self._args.disable_tqdm else None
        with tempfile.TemporaryDirectory() as folder:
            for turn in tqdm(range(self._args.times), unit="run", disable=silent):
                file = Path(folder, f"{turn}.json")
                command = [*self._command, "--disable-tqdm", "--save-result", str(file)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                self._runs.append(json.loads(file.read_text())["rows"])

    def report(self) -> Report:
        rows = [compared(same) for same in zip(*self._runs, strict=True)]
        about = [f"{len(self._runs)} runs of the row {self._args.name}"]
        settings = {"name": self._args.name, "times": self._args.times}
        notes = [verdict(rows)] if rows else []
        findings = {"repeatable": repeatable(rows)}
        program = "python -m bench.repeatability"
        return Report(
            "repeatability", about, COLUMNS, rows, settings, notes, findings, program=program
        )


def compared(runs: Sequence[Row]) -> dict[str, Any]:
    """One row of the table from the same row of every run."""
    first = runs[0]
    differing = [
        key for key in _DECIDED if key in first and any(run[key] != first[key] for run in runs)
    ]
    row: dict[str, Any] = {
        "label": ", ".join(str(first[name]) for name in _NAMES if first.get(name) is not None),
        "exact_match": first.get("exact_match"),
        "decisions": f"differ: {', '.join(differing)}" if differing else "identical",
        "differing": differing,
    }
    for name in _RATIOS:
        if name in first:
            ratios = [run[name] for run in runs]
            middle = median(ratios)
            spread = (max(ratios) - min(ratios)) / middle
            row |= {"ratio": middle, "ratios": ratios, "spread": spread}
    return row


def repeatable(rows: Sequence[Mapping[str, Any]]) -> bool:
    return not any(row["differing"] or row.get("spread", 0.0) > _LIMIT for row in rows)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    decided = sum(not row["differing"] for row in rows)
    spreads = [row["spread"] for row in rows if "spread" in row]
    text = f"{decided} of {len(rows)} rows decided the same each time"
    if spreads:
        text += f"; ratios spread by at most {max(spreads):.1%} (aim: {_LIMIT:.0%})"
    return text


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_report_arguments(parser)
    parser.add_argument("name", metavar="NAME", help="a row of bench.suite")
    words = "runs (default: 3)"
    parser.add_argument("--times", type=at_least(2), default=3, metavar="N", help=words)
    return parser


def main() -> int:
    from bench.report.measurements import SUITE  # it has a row that runs this module

    parser = make_parser()
    args = parser.parse_args()
    rows = {row.name: row for row in SUITE if row.module != "bench.repeatability"}
    if args.name not in rows:
        parser.error(f"{args.name} is none of {', '.join(rows)}")
    torch.set_num_threads(1)  # as the rows have; the report prints it
    measurement = Repeatability(args, rows[args.name].words)
    status = measure_and_publish(measurement, args)
    return status or int(not measurement.report().findings["repeatable"])


if __name__ == "__main__":
    sys.exit(main())
