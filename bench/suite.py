"""The measurements of docs/benchmarks.md.

`python -m bench.suite run` makes them on this machine. `python -m bench.suite document` writes the
page, its chapters and README.md's table from the newest results in bench/results. `python -m
bench.suite plots` draws those results again. `python -m bench.suite list` says how long each takes
on one core of an otherwise idle machine.
"""

import argparse
import shlex
import subprocess
import sys
from datetime import datetime, timezone

from bench.report.measurement import PLOTS, RESULTS, ROOT, Measurement
from bench.report.measurements import SUITE
from bench.report.page import pages
from kvserve.benchmarks.reports.plots import plot_evaluation, plot_rows, plot_sweep


def run(measurement: Measurement) -> int:
    date = datetime.now(timezone.utc).date().isoformat()
    argv = measurement.argv(RESULTS / f"{date}-{measurement.name}.json")
    sys.stdout.write(f"\n{measurement.name}: {measurement.program} {shlex.join(argv)}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", measurement.module or "kvserve", *argv]
    return subprocess.run(command, cwd=ROOT).returncode


def draw(measurement: Measurement) -> None:
    """Draw the newest result again."""
    result = measurement.newest()
    if result is None or not measurement.plots:
        return
    folder = PLOTS / measurement.name
    for old in folder.glob("*.png"):
        old.unlink()
    rows = result["rows"]
    if result["benchmark"] == "sweep":
        plot_sweep(rows, result["crossovers"], folder)
    elif result["benchmark"] == "eval":
        plot_evaluation(rows, folder)
    else:
        plot_rows(rows, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [measurement.name for measurement in SUITE]
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}")
    commands.add_parser("document", help="write docs/benchmarks.md and its chapters")
    commands.add_parser("plots", help="draw the newest results again")
    commands.add_parser("list", help="say how long each takes, and whether it was measured")
    args = parser.parse_args()
    if args.command == "document":
        for path, text in pages().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return
    if args.command == "plots":
        for each in SUITE:
            draw(each)
        return
    if args.command == "list":
        for each in SUITE:
            measured = "measured" if each.newest() else "not measured yet"
            sys.stdout.write(f"{each.name:18} {each.minutes:4g} min  {measured}\n")
        return
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [each for each in SUITE if each.name in (args.names or names)]
    failed = [each.name for each in chosen if run(each)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
