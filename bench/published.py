"""`kvserve eval` on published data sets and on the papers' needle grid.

    python -m bench.published --model M --benchmark math=data/math500.jsonl --policy kara
    python -m bench.published --tasks needle-grid --policy snapkv:budget=64 --save-plots FOLDER

It has all flags of `kvserve eval`, further formats of `--benchmark`, and solved problems in front.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.data_sets.formats import FORMATS, SOLVED
from bench.data_sets.needle_grid import NEEDLE_GRID, by_cell, needle_grid, plot_needles
from kvserve.benchmarks.commands import evaluate
from kvserve.benchmarks.measuring.measure import Played
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.options import at_least, number
from kvserve.benchmarks.setup.policy_spec import PolicySpec
from kvserve.log import ConfigError, RequestError
from kvserve.server.settings.args import Parser

COLUMNS = evaluate.COLUMNS
_LENGTHS = [256, 512, 1024, 1536, 2048]
_DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def make_parser() -> Parser:
    parser = Parser(prog="python -m bench.published", description=__doc__)
    evaluate.add_arguments(parser, FORMATS, {NEEDLE_GRID: needle_grid})
    words = f"{', '.join(SOLVED)}: solved problems in front of each (default: 0)"
    parser.add_argument("--num-fewshot", type=at_least(0), default=0, metavar="N", help=words)
    words = "take them from this file's first lines (default: eight of our own for gsm8k)"
    parser.add_argument("--fewshot-file", type=Path, metavar="FILE", help=words)
    words = f"{NEEDLE_GRID}: tokens of the texts (default: {' '.join(map(str, _LENGTHS))})"
    least = at_least(256)
    parser.add_argument(
        "--grid-lengths", nargs="+", type=least, default=_LENGTHS, metavar="N", help=words
    )
    words = f"{NEEDLE_GRID}: where the needle lies, 0 is the beginning "
    words += f"(default: {' '.join(map(str, _DEPTHS))})"
    share = number(0, 1, closed=True)
    parser.add_argument(
        "--grid-depths", nargs="+", type=share, default=_DEPTHS, metavar="X", help=words
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Refuse flags that would do nothing."""
    formats = {name for name, _ in args.benchmark}
    if args.fewshot_file and not args.num_fewshot:
        args.fail("--fewshot-file needs --num-fewshot")
    if args.num_fewshot and not formats & {*SOLVED}:
        args.fail(f"--num-fewshot is for --benchmark {'=, '.join(SOLVED)}=")
    if args.num_fewshot and args.fewshot_file and len(formats) > 1:
        args.fail("--fewshot-file is of one format, and --benchmark names several")


class Published(evaluate.Evaluation):
    """With the grid's cells in its row, and the mean over several files."""

    def row(self, task: str, spec: PolicySpec, stored: str, played: Played) -> dict[str, Any]:
        row = super().row(task, spec, stored, played)
        if task == NEEDLE_GRID:
            grades = self.workloads[task].grades(played.answers)
            row["grid"] = by_cell(grades, self.args.grid_lengths, self.args.grid_depths)
        return row

    def report(self) -> Report:
        report, args = super().report(), self.args
        grids = [row for row in report.rows if "grid" in row]
        drawn = plot_needles(grids, args.save_plots) if args.save_plots and grids else []
        return replace(
            report,
            settings={**report.settings, "num_fewshot": args.num_fewshot},
            notes=[*report.notes, *_means(report.rows, [path.stem for _, path in args.benchmark])],
            plots=[*report.plots, *drawn],
            program="python -m bench.published",
        )


def _means(rows: Sequence[Row], files: Sequence[str]) -> list[str]:
    """Each policy's mean score over several files, as papers print it of LongBench."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] in files:
            name = f"{row['policy']} in {row['kv_cache_dtype']}"
            scores.setdefault(name, []).append(row["score"])
    return [
        f"mean score over {len(files)} files: {name}: {sum(found) / len(found):.4f}"
        for name, found in scores.items()
        if len(found) == len(files) > 1
    ]


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    try:
        args = parser.parse(argv)
        check_arguments(args)
        return evaluate.run(args, Published)
    except (ConfigError, RequestError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
