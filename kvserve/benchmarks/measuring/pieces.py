"""A measurement in pieces: each run is saved when it ends, and a later call continues.

A table may take longer than a machine is free at one time. With ``--minutes`` a command starts no
run that may not end in time; the same command, called again, makes the missing runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from kvserve.benchmarks.measuring.measure import Figures
from kvserve.benchmarks.reports.report import commit
from kvserve.benchmarks.setup.options import number
from kvserve.log import ConfigError

_OWN_FLAGS = ("--minutes", "--save-plots", "--save-markdown")


def add_pieces_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=number(0),
        metavar="N",
        help="start no run that may not end within N minutes; run the same command again to "
        "continue (runs are kept beside --save-result)",
    )


class Pieces:
    """The runs of a command, made by earlier calls and by this one.

    Without ``--minutes`` nothing is saved, and there is always time.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.minutes and args.save_result is None:
            args.fail("--minutes needs --save-result FILE.json; runs are kept beside it")
        self._limit = None if args.minutes is None else 60 * args.minutes
        self._began = time.monotonic()
        self._longest = 0.0
        self.complete = False
        """Whether every run is made; set by ``run_in_turns``."""
        self._path: Path | None = None
        self._runs: list[dict[str, Any]] = []
        if self._limit is not None:
            self._path = args.save_result.with_suffix(".runs.json")
            self._runs = self._before()

    @property
    def commits(self) -> list[str]:
        """Commits of the runs, in order of first appearance."""
        return list(dict.fromkeys(run["commit"] for run in self._runs))

    def find(self, title: str, turn: int) -> Figures | None:
        """The figures of a run that an earlier call made."""
        for run in self._runs:
            if (run["title"], run["turn"]) == (title, turn):
                self._longest = max(self._longest, run["seconds"])
                figures: Figures = run["figures"]
                return figures
        return None

    @property
    def has_time(self) -> bool:
        """Whether one more run would end in time, if it takes as long as the longest so far."""
        spent = time.monotonic() - self._began
        return self._limit is None or spent + self._longest <= self._limit

    def add(self, title: str, turn: int, figures: Figures, seconds: float) -> None:
        self._longest = max(self._longest, seconds)
        if self._path is None:
            return
        facts = {"title": title, "turn": turn, "commit": commit(), "seconds": seconds}
        self._runs.append({**facts, "figures": figures})
        document = {"command": _words(), "runs": self._runs}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(document) + "\n")

    def clear(self) -> None:
        """Remove the saved runs, if the written result has all of them."""
        if self._path is not None and self.complete:
            self._path.unlink(missing_ok=True)

    def notes(self) -> list[str]:
        """Notes for readers of a table that was made in pieces."""
        if self._path is None:
            return []
        found = [] if self.complete else ["some runs are not made yet: run the same command again"]
        if len(self.commits) > 1:
            found.append(f"runs were made at several commits: {', '.join(self.commits)}")
        return found

    def _before(self) -> list[dict[str, Any]]:
        assert self._path is not None
        if not self._path.exists():
            return []
        document = json.loads(self._path.read_text())
        if document["command"] != _words():
            raise ConfigError(f"--minutes: {self._path} has runs of another command; remove it")
        runs: list[dict[str, Any]] = document["runs"]
        return runs


def _words() -> list[str]:
    """This command without the flags that may differ from call to call."""
    words, kept = iter(sys.argv[1:]), []
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in _OWN_FLAGS:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
