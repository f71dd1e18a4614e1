"""Reports of the benchmark commands: facts about the machine, a table, a JSON file."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

import kvserve

EXIT_INTERRUPTED = 130
_PACKAGES = ("torch", "transformers", "numpy", "triton")
_ROOT = Path(kvserve.__file__).resolve().parents[1]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column: ``style`` is a format spec (``.2f``) or a function; ``None`` shows as a dash."""

    title: str
    key: str
    style: str | Callable[[Any], str] = ""
    left: bool = False

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        if value is None:
            return "–"
        return self.style(value) if callable(self.style) else format(value, self.style)


@dataclass
class Report:
    """One command's result: ``about`` stands above the table, ``notes`` below it.

    Without columns there is no table, and ``findings`` are the result. ``device`` (type, name) is
    set if the figures are not of this machine. ``program`` is the beginning of the command line.
    """

    benchmark: str
    about: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Row]
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()
    findings: Mapping[str, Any] = field(default_factory=dict)
    """Results of all rows together, at the top of the JSON file."""
    plots: Sequence[Path] = ()
    complete: bool = True
    device: Mapping[str, str] | None = None
    program: str = "kvserve"


class Measurement(Protocol):
    """If ``measure`` is cut short, ``report`` still reports what was measured until then."""

    def measure(self) -> None: ...

    def report(self) -> Report: ...


def measure_and_publish(measurement: Measurement, args: argparse.Namespace) -> int:
    """Measure, then print and save; if cut short, what was measured until then."""
    try:
        measurement.measure()
    except KeyboardInterrupt:
        _publish(measurement.report(), args, complete=False)
        return EXIT_INTERRUPTED
    except Exception:
        partial = measurement.report()
        if partial.rows:
            _publish(partial, args, complete=False)
        raise
    _publish(measurement.report(), args, complete=True)
    return 0


def _publish(report: Report, args: argparse.Namespace, complete: bool) -> None:
    """Print a report, and save it where ``--save-result`` and ``--save-markdown`` say."""
    facts = machine_facts(report.program, report.device or _device())
    complete = complete and report.complete
    notes = list(report.notes)
    if not complete:
        notes.append("cut short: this is what was measured until then")
    about, table = [*report.about, describe_machine(facts)], []
    head = {"benchmark": report.benchmark, **facts, "complete": complete}
    printed = {"about": report.about, "notes": report.notes}
    document = {**head, **printed, "settings": report.settings, **report.findings}
    if report.columns:
        table = [markdown_table(report.columns, report.rows) if report.rows else "nothing measured"]
        document |= {"columns": [column.key for column in report.columns], "rows": report.rows}
    if args.save_result is not None:
        _write(args.save_result, to_json(document))
    if args.save_markdown is not None:
        command = f"```\n{facts['command']}\n```"
        _write(args.save_markdown, "\n\n".join([*about, command, *table, *notes]))
    paths = (args.save_result, args.save_markdown, *report.plots)
    saved = [f"saved to {path}" for path in paths if path]
    parts = filter(None, ("\n".join(part) for part in (about, table, [*notes, *saved])))
    sys.stdout.write("\n\n".join(parts) + "\n")
    sys.stdout.flush()


def to_json(document: Mapping[str, Any]) -> str:
    """JSON with a line for each field, and for each of the objects that a field lists."""
    lines = []
    for name, value in document.items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
            text = (
                "[\n    " + ",\n    ".join(json.dumps(e, allow_nan=False) for e in value) + "\n  ]"
            )
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def markdown_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """An aligned Markdown table; columns without a value in any row are left out."""
    used = [c for c in columns if any(row.get(c.key) is not None for row in rows)]
    cells = [[c.title for c in used], *([c.cell(row) for c in used] for row in rows)]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(used))]
    rule = [
        "-" * width if column.left else "-" * (width - 1) + ":"
        for column, width in zip(used, widths, strict=True)
    ]
    padded = [
        [
            text.ljust(width) if column.left else text.rjust(width)
            for text, column, width in zip(line, used, widths, strict=True)
        ]
        for line in (cells[0], rule, *cells[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


# ---- the machine ------------------------------------------------------------------------------


def machine_facts(program: str, device: Mapping[str, str]) -> dict[str, Any]:
    """Date, device, threads, commit, versions and command line of this run."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": dict(device),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": {
            "kvserve": kvserve.__version__,
            "python": platform.python_version(),
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
        "command": shlex.join([*shlex.split(program), *sys.argv[1:]]),
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    threads = facts["threads"]
    version, dash, changed = facts["commit"].partition("-")
    return (
        f"{facts['device']['name']} ({facts['device']['type']}), "
        f"{threads} thread{'s' if threads > 1 else ''}, torch {facts['versions']['torch']}, "
        f"kvserve {facts['versions']['kvserve']} at commit {version[:12]}{dash}{changed}"
    )


def _device() -> dict[str, str]:
    if torch.cuda.is_available():
        return {"type": "cuda", "name": torch.cuda.get_device_name()}
    return {"type": "cpu", "name": cpu_name()}


def cpu_name() -> str:
    """The processor, as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def commit() -> str:
    """The checkout's commit (``-dirty`` if changed); "unknown" if the package is in no own
    checkout."""
    question = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            ["git", f"--git-dir={_ROOT / '.git'}", f"--work-tree={_ROOT}", *question],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return "unknown" if done.returncode else done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
