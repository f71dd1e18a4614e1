"""What the benchmark commands write: where a run took place, a table, a JSON file."""

from __future__ import annotations

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
from typing import Any

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

    ``device`` (type, name) is given where the figures are not this machine's; ``program`` is what
    the command line began with.
    """

    benchmark: str
    about: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Row]
    settings: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    device: Mapping[str, str] | None = None
    program: str = "kvserve"


def run_and_publish(
    measure: Callable[[], None], report: Callable[[], Report], save_to: Path | None
) -> int:
    """Run ``measure``, then print and save ``report()``; what it had is kept if it is cut short."""
    if save_to is not None:
        save_to.parent.mkdir(parents=True, exist_ok=True)
    try:
        measure()
    except KeyboardInterrupt:
        _publish(report(), save_to, complete=False)
        return EXIT_INTERRUPTED
    except Exception:
        partial = report()
        if partial.rows:
            _publish(partial, save_to, complete=False)
        raise
    _publish(report(), save_to, complete=True)
    return 0


def _publish(report: Report, save_to: Path | None, complete: bool) -> None:
    facts = machine_facts(report.program, report.device or _device())
    lines = [*report.about, describe_machine(facts), ""]
    lines += [markdown_table(report.columns, report.rows) if report.rows else "nothing measured"]
    notes = list(report.notes)
    if not complete:
        notes.append("cut short: this is what was measured until then")
    if save_to is not None:
        document = {
            "benchmark": report.benchmark,
            **facts,
            "complete": complete,
            "settings": report.settings,
            "rows": report.rows,
        }
        save_to.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
        notes.append(f"saved to {save_to}")
    lines += ["", *notes] if notes else []
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


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
        "commit": _commit(),
        "versions": {
            "kvserve": kvserve.__version__,
            "python": platform.python_version(),
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
        "command": shlex.join([*shlex.split(program), *sys.argv[1:]]),
    }


def describe_machine(facts: Mapping[str, Any]) -> str:
    threads = facts["threads"]
    commit, dash, changed = facts["commit"].partition("-")
    return (
        f"{facts['device']['name']} ({facts['device']['type']}), "
        f"{threads} thread{'s' if threads > 1 else ''}, torch {facts['versions']['torch']}, "
        f"kvserve {facts['versions']['kvserve']} at commit {commit[:12]}{dash}{changed}"
    )


def _device() -> dict[str, str]:
    if torch.cuda.is_available():
        return {"type": "cuda", "name": torch.cuda.get_device_name()}
    return {"type": "cpu", "name": _cpu_name()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _commit() -> str:
    """The checkout's commit (``-dirty`` if changed); a package inside another's tree has none."""
    command = ["git", "-C", str(_ROOT)]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    outputs = []
    for question in (
        ["rev-parse", "--show-toplevel"],
        ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
    ):
        try:
            done = subprocess.run(
                [*command, *question], capture_output=True, text=True, timeout=10, env=environment
            )
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        if done.returncode:
            return "unknown"
        outputs.append(done.stdout.strip())
    return outputs[1] if Path(outputs[0]).resolve() == _ROOT else "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
