"""Chapters of docs/benchmarks.md, their sections, the command and the newest result of each."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.report import Column

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PLOTS = ROOT / "bench" / "results", ROOT / "docs" / "plots"


@dataclass(frozen=True)
class Measurement:
    """A section of a chapter: one command, and what a reader has to know about its figures.

    The command is one of kvserve or of a ``module`` under bench; ``minutes`` is its time on one
    idle core.
    ``equal_bytes``: methods are also compared at the same bytes held.
    """

    name: str
    title: str
    text: str
    command: str
    minutes: float
    plots: bool = False
    module: str | None = None
    equal_bytes: bool = False

    @property
    def program(self) -> str:
        return f"python -m {self.module}" if self.module else "kvserve"

    @property
    def words(self) -> list[str]:
        """The command line without the flags for results."""
        return [sys.executable, "-m", self.module or "kvserve", *shlex.split(self.command)]

    def argv(self, result: Path) -> list[str]:
        words = shlex.split(self.command)
        plots = ["--save-plots", str((PLOTS / self.name).relative_to(ROOT))]
        return [*words, "--save-result", str(result.relative_to(ROOT)), *plots * self.plots]

    def table(self, keys: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these keys."""
        if self.module is None:
            return columns(*keys)
        own = {column.key: column for column in importlib.import_module(self.module).COLUMNS}
        return tuple(own[key] for key in keys)

    def newest(self) -> dict[str, Any] | None:
        """The latest complete result; files are named DATE-NAME.json."""
        found = sorted(RESULTS.glob(f"????-??-??-{self.name}.json"))
        documents = [json.loads(path.read_text()) for path in found]
        complete = [each for each in documents if each["complete"] and "columns" in each]
        return complete[-1] if complete else None


@dataclass(frozen=True)
class Chapter:
    """A page under docs/benchmarks; ``about``: what it shows, in a sentence or two."""

    slug: str
    title: str
    about: str
    measurements: tuple[Measurement, ...]


def flags(policies: Iterable[str]) -> str:
    """``--policy`` of each, as a command line has them."""
    return " ".join(f"--policy {policy}" for policy in policies)
