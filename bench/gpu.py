"""The engine on a GPU: policies against `none` on one pool, random weights of published shapes.

    make bench-gpu ARGS="--save-result bench/results/DATE-gpu-H200.json"

Needs a CUDA device, torch, Triton, numpy, tokenizers, safetensors and transformers; kvserve's other
dependencies are not needed.

Figures of a wrong engine mean nothing: the parts of bench/gpu_check.py that check tokens, graphs
and kernels run first, unless a check of this machine and commit is saved. Wrong tokens end the run,
other faults stand beside the figures. Each row runs in a
process of its own and is saved (JSON, and a Markdown table beside it) when it ends. A row that
failed is tried once more, and again by the next call. A call ends within nine minutes: run it again
with the same file until it says that all is done.

``--profile`` and ``--tile`` measure something else instead: what a decode step and an event consist
of, and which tiles are fastest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check import CHECKED, check
from bench.gpu_runs.jobs import JOBS, NONE, Job
from bench.gpu_runs.parts import PARTS
from bench.machine import ROOT, machine, run_apart, write_json

ROW_SECONDS, CALL_SECONDS, START_SECONDS = 80.0, 540.0, 40.0
FIRST = tuple(name for name in PARTS if name.startswith(("tokens", "graphs", "kernels")))
"""Parts of bench/gpu_check.py that run before anything is measured. Without right tokens no figure
means anything; what else is wrong stands beside the figures."""
FIGURES = (
    *("output_tok_s", "late_tok_s", "ratio_to_none", "itl_p50_ms", "itl_p99_ms", "mean_running"),
    *("held_over_logical", "compactions", "event_share", "preemptions", "steps", "graph_steps"),
    *("of_bandwidth", "finished", "error"),
)


class Results:
    """The results so far, saved after every row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = {"machine": machine(), "wrong": None, "rows": {}}
        if path.exists():
            before = json.loads(path.read_text())
            if before["machine"] != self.found["machine"]:
                raise SystemExit(f"{path}: of another machine, driver, commit or versions")
            self.found = before

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = self.found["rows"]
        return rows

    def has(self, job: Job) -> bool:
        """Whether the job has a row without an error."""
        return job.name in self.rows and "error" not in self.rows[job.name]

    def add(self, job: Job, row: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.rows[job.name] = {"policy": job.label, "traffic": job.traffic, "date": now, **row}
        base = {row["traffic"]: row for row in self.rows.values() if row["policy"] == NONE}
        for row in self.rows.values():
            first = base.get(row["traffic"], {})
            if "output_tok_s" in row and "output_tok_s" in first:
                row["ratio_to_none"] = row["output_tok_s"] / first["output_tok_s"]
        self.write()

    def write(self) -> None:
        write_json(self.path, self.found)
        self.path.with_suffix(".md").write_text(self.table())

    def table(self) -> str:
        """Markdown, one table per traffic."""
        about = ", ".join(f"{name} {value}" for name, value in self.found["machine"].items())
        lines = [f"Random weights; {about}.", ""]
        if self.found["wrong"]:
            lines += [f"**Wrong in this machine's check: {', '.join(self.found['wrong'])}.**", ""]
        for traffic in dict.fromkeys(row["traffic"] for row in self.rows.values()):
            lines += [f"**{traffic}**", "", "| policy | " + " | ".join(FIGURES) + " |"]
            lines += ["|---" * (len(FIGURES) + 1) + "|"]
            for row in self.rows.values():
                if row["traffic"] == traffic:
                    cells = (_cell(row.get(figure)) for figure in FIGURES)
                    lines.append(f"| {row['policy']} | " + " | ".join(cells) + " |")
            lines.append("")
        return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return "" if value is None else " ".join(str(value).split())[:200].replace("|", "/")


def wrong_parts(results: Results, checked: Path, smoke: bool) -> list[str]:
    """The parts of ``FIRST`` that are not right, by a check of this machine and commit: the saved
    one, or one that is made now, once per file."""
    if results.found["wrong"] is None:
        found = json.loads(checked.read_text()) if checked.exists() else {}
        if found.get("machine") != results.found["machine"]:
            path = results.path.with_name(f"{results.path.stem}-check.json")
            check(list(FIRST[:1] if smoke else FIRST), path, 300.0)
            found = json.loads(path.read_text())
        parts = found["parts"].items()
        results.found["wrong"] = [name for name, part in parts if not part["right"]]
        results.write()
    wrong: list[str] = results.found["wrong"]
    return wrong


def play_rows(
    results: Results, jobs: list[Job], args: argparse.Namespace, until: float
) -> Iterator[Job]:
    """Measures the missing rows; those that fail are tried once more after all others.

    Yields the jobs for which too little time was left.
    """
    missing = [job for job in jobs if not results.has(job)]
    tried: set[str] = set()
    while missing:
        job = missing.pop(0)
        if time.monotonic() + args.row_seconds + START_SECONDS > until and results.rows:
            yield job
            continue
        path = results.path.with_name(f"{results.path.stem}-row.json")
        options = [job.name, str(path), f"--row-seconds={args.row_seconds}"]
        options += ["--smoke"] * args.smoke
        limit = args.row_seconds + 2 * START_SECONDS
        ended = run_apart(["-m", "bench.gpu_runs.row", *options], path, limit)
        path.unlink(missing_ok=True)
        results.add(job, ended.found if ended.error is None else {"error": ended.error})
        shown = (f"{name} {_cell(results.rows[job.name].get(name))}" for name in FIGURES[:4])
        sys.stdout.write(f"{job.name}: {ended.error or ', '.join(shown)}\n")
        sys.stdout.flush()
        if ended.error is not None and job.name not in tried:
            missing.append(job)
        tried.add(job.name)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the engine on a GPU, policy by policy")
    words = "JSON; a table is written beside it (default: build/bench-gpu.json)"
    default = ROOT / "build" / "bench-gpu.json"
    parser.add_argument("--save-result", type=Path, default=default, metavar="FILE", help=words)
    words = "result of make gpu-check; if it is of this machine and commit, it is not repeated"
    parser.add_argument("--checked", type=Path, default=CHECKED, metavar="FILE", help=words)
    words = f"begin no row that may not end within so long (default: {CALL_SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, default=CALL_SECONDS, metavar="S", help=words)
    words = f"time limit of a row; unfinished requests count as they are ({ROW_SECONDS:.0f})"
    parser.add_argument("--row-seconds", type=float, default=ROW_SECONDS, metavar="S", help=words)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to try the command")
    words = "a decode step and an event by torch.profiler: tables and a trace, beside FILE"
    parser.add_argument("--profile", action="store_true", help=words)
    words = "time tiles and write the fastest into kvserve/kernels/tiles.py"
    parser.add_argument("--tile", action="store_true", help=words)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if not torch.cuda.is_available() and not args.smoke:
        sys.stderr.write("bench/gpu.py: torch sees no CUDA device; --smoke tries the command\n")
        return 2
    for name in ("profile", "tile"):
        if getattr(args, name):
            options = ["--save-result", str(args.save_result), *["--smoke"] * args.smoke]
            command = [sys.executable, "-m", f"bench.gpu_runs.{name}", *options]
            return subprocess.run(command, cwd=ROOT).returncode
    until = time.monotonic() + args.seconds
    results = Results(args.save_result)
    if "tokens" in wrong_parts(results, args.checked, args.smoke):
        sys.stdout.write("wrong answers are not measured: see make gpu-check\n")
        return 1
    jobs = list(JOBS)
    if args.smoke:  # all models become the same small one
        jobs = list({job.small().name: job.small() for job in JOBS}.values())
    if left := len(list(play_rows(results, jobs, args, until))):
        sys.stdout.write(f"{left} rows left: run the same command again\n")
        return 0
    failed = [job.name for job in jobs if not results.has(job)]
    table = args.save_result.with_suffix(".md")
    state = f"{len(failed)} of them failed" if failed else "all right"
    sys.stdout.write(f"all {len(jobs)} rows are done, {state}: {table}\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
