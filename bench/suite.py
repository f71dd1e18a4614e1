"""The measurements behind docs/benchmarks.md.

`python -m bench.suite run` makes them on this machine, `show` prints the newest results as
Markdown, `plots` draws them again. `list` says how long each takes on one core of an otherwise idle
machine. `make docs-site` builds pages of all of them.
"""

import argparse
import shlex
import subprocess
import sys
from datetime import datetime, timezone

from bench.harness.reports.plots import plot_evaluation, plot_rows
from bench.needle_grid import plot_needles
from bench.report.measurements import PLOTS, RESULTS, ROOT, SUITE, Measurement
from bench.report.page import section


def run(measurement: Measurement) -> int:
    """Run the command of the newest result once more."""
    date = datetime.now(timezone.utc).date().isoformat()
    result = RESULTS / f"{date}-{measurement.name}.json"
    words = [*measurement.words, "--save-result", str(result.relative_to(ROOT))]
    if measurement.plots:
        words += ["--save-plots", str((PLOTS / measurement.name).relative_to(ROOT))]
    sys.stdout.write(f"\n{measurement.name}: {shlex.join(words)}\n")
    sys.stdout.flush()
    program = ["-m", "kvserve"] if words[0] == "kvserve" else []
    return subprocess.run([sys.executable, *program, *words[1:]], cwd=ROOT).returncode


def draw(measurement: Measurement) -> None:
    """Draw the newest result again."""
    if measurement.plots:
        result = measurement.newest()
        plot = plot_evaluation if result["benchmark"] == "eval" else plot_rows
        plot(result["rows"], PLOTS / measurement.name)
        if grids := [row for row in result["rows"] if "grid" in row]:
            plot_needles(grids, PLOTS / measurement.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [measurement.name for measurement in SUITE]
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}")
    shower = commands.add_parser("show", help="print the newest results as Markdown")
    shower.add_argument("names", nargs="*", metavar="NAME", help="as for run")
    commands.add_parser("plots", help="draw the newest results again")
    commands.add_parser("list", help="say how long each takes, and when it was measured")
    args = parser.parse_args()
    if args.command == "plots":
        for each in SUITE:
            draw(each)
        return
    if args.command == "list":
        for each in SUITE:
            sys.stdout.write(
                f"{each.name:28} {each.minutes:4g} min  {each.newest()['date'][:10]}\n"
            )
        return
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [each for each in SUITE if each.name in (args.names or names)]
    if args.command == "show":
        sys.stdout.write("\n\n".join(map(section, chosen)) + "\n")
        return
    failed = [each.name for each in chosen if run(each)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
