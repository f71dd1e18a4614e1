"""`kvserve eval` with one more task, the papers' needle grid.

python -m bench.needles --tasks needle-grid --policy snapkv:budget=64 --save-plots FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.harness.commands import evaluate
from bench.harness.measuring.measure import Played
from bench.harness.reports.report import Report
from bench.harness.setup.options import at_least, number
from bench.harness.setup.policy_spec import PolicySpec
from bench.needle_grid import NEEDLE_GRID, by_cell, needle_grid, plot_needles
from kvserve.log import ConfigError, RequestError
from kvserve.server.settings.args import Parser

COLUMNS = evaluate.COLUMNS
_LENGTHS = [256, 512, 1024, 1536, 2048]
_DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def make_parser() -> Parser:
    parser = Parser(prog="python -m bench.needles", description=__doc__)
    evaluate.add_arguments(parser, {NEEDLE_GRID: needle_grid})
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


class Grid(evaluate.Evaluation):
    """With the grid's cells in its row."""

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
            plots=[*report.plots, *drawn],
            program="python -m bench.needles",
        )


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    try:
        args = parser.parse(argv)
        return evaluate.run(args, Grid)
    except (ConfigError, RequestError) as error:
        sys.exit(f"{parser.prog}: error: {error}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
