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


# ---- titles, the same in every command ----------------------------------------------------------

_COLUMNS = {
    column.key: column
    for column in (
        Column("task", "task", left=True),
        Column("pool", "pool_blocks", ",d"),
        Column("of the demand", "pool_share", ".2f"),
        Column("max seqs", "max_num_seqs", "d"),
        Column("policy", "policy", left=True),
        Column("retention", "retention", "g"),
        Column("cache held in", "kv_cache_dtype", left=True),
        Column("prefix caching", "prefix_caching", left=True),
        Column("speculation", "speculation", left=True),
        Column("guessed", "draft_tokens", ",d"),
        Column("of these right", "accepted_share", ".0%"),
        Column("output tokens", "output_tokens", ",d"),
        Column("wall s", "wall_s", ".2f"),
        Column("output tok/s", "output_tok_s", ",.1f"),
        Column("of all runs", "spread"),
        Column("vs first", "ratio_to_first", ".2f"),
        Column("of all runs", "ratio_spread"),
        Column("mean running", "mean_running", ".1f"),
        Column("peak", "peak_running", "d"),
        Column("pool in use", "mean_pool_usage", ".0%"),
        Column("held/logical", "held_over_logical", ".2f"),
        Column("held/logical at end", "held_over_logical_at_end", ".3f"),
        Column("bytes per sequence, mean", "mean_held_bytes", ",.0f"),
        Column("bytes of blocks at end", "allocated_bytes_at_end", ",.0f"),
        Column("blocks released", "blocks_released", ",d"),
        Column("events", "compactions", ",d"),
        Column("early", "early_compactions", ",d"),
        Column("evicted", "evicted_tokens", ",d"),
        Column("preemptions", "preemptions", ",d"),
        Column("swaps", "swaps", ",d"),
        Column("turns that went on", "resumed_turns", ",d"),
        Column("prompt cached", "prompt_cached", ".0%"),
        Column("steps", "steps", ",d"),
        Column("itl p50 ms", "itl_p50_ms", ".1f"),
        Column("itl p99 ms", "itl_p99_ms", ".1f"),
        Column("exact match", "exact_match", ".3f"),
        Column("±", "exact_match_error", ".3f"),
        Column("95% interval", "interval_95", lambda bounds: "{:.3f}–{:.3f}".format(*bounds)),
        Column("correct prefix", "correct_prefix", ".3f"),
        Column("score", "score", ".3f"),
        Column("text", "text", left=True),
        Column("of the full cache", "of_full", ".3f"),
        Column("at the end", "of_full_at_end", ".3f"),
        Column("KL", "kl", ".4f"),
        Column("±", "kl_error", ".4f"),
        Column("NLL lost", "nll_lost", "+.4f"),
        Column("±", "nll_lost_error", ".4f"),
        Column("same first choice", "same", ".3f"),
        Column("facts found", "facts", ".2f"),
        Column("events", "events_per_text", ".1f"),
        Column("n", "n", "d"),
        Column("answers each", "answers_each", "d"),
        Column("seed", "seed", "d"),
        Column(
            "events per request",
            "compactions_per_request",
            lambda mean: f"{mean:.2f}" if mean else "never reached",
        ),
        Column("ms an event", "event_ms", ".2f"),
    )
}


def columns(*keys: str) -> tuple[Column, ...]:
    """The columns of these figures, in this order; tables leave out columns without any value."""
    return tuple(_COLUMNS[key] for key in keys)
