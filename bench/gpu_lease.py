"""What a machine with a GPU, lent for minutes, is used for: ``python -m bench.gpu_lease --part N``.

Part 1 asks whether everything is right, part 2 how fast it is; each is one command of a lease. The
stages run in the order of their worth, each in a process of its own with a time limit and a log.
Whatever there is lies in ``lease.tgz`` after every stage, so a call that is cut off loses one. A
stage that fails leaves the others. Needs what bench/gpu_check.py needs. Before a lease, on a
machine without a GPU and with the other's Triton:

    python -m bench.gpu_runs.precompile note build/lease/variants.json
    python -m bench.gpu_lease --part 1 --smoke     # every stage, on this CPU

and carry ``build/lease`` with the tree, which is not under git there: name the commit in
KVSERVE_COMMIT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu_runs.jobs import JOBS, Job
from bench.machine import ROOT, Ended, machine, run_apart, write_json

VARIANTS = ROOT / "build" / "lease" / "variants.json"
_LEAST = 20.0
"""Seconds below which no stage begins, if it does not say what it needs."""
_FACTS = (
    "import json, subprocess, sys, torch, triton, numpy; from bench.machine import machine; "
    "print(subprocess.run(['nvidia-smi'], capture_output=True, text=True).stdout) "
    "if torch.cuda.is_available() else None; "
    "json.dump(machine() | {'numpy': numpy.__version__}, open(sys.argv[1], 'w'))"
)
_ROW = (
    *("output_tok_s", "late_tok_s", "mean_running", "held_over_logical", "itl_p50_ms"),
    *("itl_p99_ms", "of_bandwidth", "event_share", "compactions", "preemptions", "swaps"),
    *("steps", "graph_steps", "start_s", "finish_reasons", "error"),
)


_SOME_TESTS = ("--seconds", "50"), ("--seconds", "60", "--groups", "policies-uneven")
"""On a GPU, and to try the command."""


@dataclass(frozen=True)
class Stage:
    """``arguments`` of Python, to which the file of the result and ``options`` are added."""

    name: str
    limit: float
    arguments: tuple[str, ...]
    options: tuple[str, ...] = ()
    shown: Callable[[dict[str, Any]], list[str]] = lambda found: []
    least: float = _LEAST


def stages(part: int, smoke: bool, row_seconds: float) -> list[Stage]:
    small = ("--smoke",) * smoke
    if part == 1:
        check = ("-m", "bench.gpu_check", "--save-result")
        levels = ("-m", "bench.gpu_runs.tile", "--kernel", "decode levels", "--result")
        return [
            Stage("facts", 30, ("-c", _FACTS), shown=lambda found: [json.dumps(found)]),
            Stage("levels", 60, levels, small, _fastest),
            Stage("check", 130, check, ("--seconds", "125"), _wrong),
            Stage("served", 90, ("-m", "bench.gpu_runs.served"), small, _said),
            Stage("sdpa", 60, ("-m", "bench.gpu_runs.sdpa"), small, _attention),
            Stage("tests", 60, ("-m", "bench.gpu_runs.engine_tests"), _SOME_TESTS[smoke], _tests),
        ]
    jobs = (job.small() if smoke else job for job in JOBS[:7])
    none, kara, snapkv, *k8v4, none4, kara4 = (_row(job, row_seconds, small) for job in jobs)
    profile = ("-m", "bench.gpu_runs.profile", "--save-result")
    return [none, kara, *k8v4, none4, Stage("profile", 110, profile, small), kara4, snapkv]


def _row(job: Job, seconds: float, small: tuple[str, ...]) -> Stage:
    """A row of bench/gpu.py, whatever was right."""
    form = "" if job.form == "auto" else f"@{job.form}"
    name = f"row-{job.policy.partition(':')[0]}{form}"
    arguments = ("-m", "bench.gpu_runs.row", job.name)
    options = (f"--row-seconds={seconds}", *small)
    return Stage(name, seconds + 80, arguments, options, _figures, seconds + 18)


def _figures(found: dict[str, Any]) -> list[str]:
    shown = {name: found.get(name) for name in _ROW}
    rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in shown.items()}
    return [json.dumps({name: value for name, value in rounded.items() if value is not None})]


def _fastest(found: dict[str, Any]) -> list[str]:
    """The three fastest tiles of each kernel, with microseconds by batch."""
    return [
        f"{kernel} {row['tile']}: "
        + ", ".join(f"{name} {us:.0f}" for name, us in row.items() if name != "tile")
        for kernel, rows in found.items()
        if kernel != "machine"
        for row in rows[:3]
    ]


def _wrong(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in found.get("parts", {}).items():
        lines.append(f"{name}: {'right' if part['right'] else 'WRONG'}, {len(part['rows'])} cases")
        for row in part["rows"]:
            if not row["right"] or row.get("choice"):
                lines.append(f"    {row['case']}: {str(row['found']).strip()[-160:]}")
        if part["error"]:
            lines.append(f"    {part['error'].strip()[-300:]}")
    return lines


def _said(found: dict[str, Any]) -> list[str]:
    return [json.dumps({name: value for name, value in found.items() if name != "log"})]


def _tests(found: dict[str, Any]) -> list[str]:
    lines = []
    for name, group in found.get("groups", {}).items():
        counts = ", ".join(f"{n} {outcome}" for outcome, n in group["counts"].items())
        lines.append(f"{name}: {counts or group['log'][-300:]}; status {group['status']}")
        reasons = Counter(row["error"].strip().splitlines()[-1][:150] for row in group["failed"])
        lines += [f"    {n} x {reason}" for reason, n in reasons.most_common(4)]
    return lines


def _attention(found: dict[str, Any]) -> list[str]:
    return [
        f"{row['case']}: {row['kernel']}: {row['us']:.0f} us, {row['tb_s']:.2f} TB/s"
        for row in found.get("rows", [])
        if "us" in row
    ]


class Lease:
    """Runs stages and keeps what they leave in ``folder``, packed into ``packed`` each time."""

    def __init__(self, folder: Path, packed: Path, seconds: float) -> None:
        self.folder, self.packed = folder, packed
        self.until = time.monotonic() + seconds
        self.found: dict[str, Any] = {"machine": machine(), "stages": {}}

    def run(self, stage: Stage) -> bool:
        """Whether the stage ended by itself with status 0."""
        left = self.until - time.monotonic()
        result = self.folder / f"{stage.name}.json"
        ended = Ended(0.0, {}, "no time was left for it")
        if left > stage.least:
            command = [*stage.arguments, str(result), *stage.options]
            ended = run_apart(command, result, min(stage.limit, left))
        self.found["stages"][stage.name] = {"seconds": ended.seconds, "error": ended.error}
        write_json(self.folder / "lease.json", self.found)
        self._pack()
        lines = [f"== {stage.name}: {ended.seconds:.0f} s, {left - ended.seconds:.0f} s left"]
        log = result.with_suffix(".log").read_text(errors="replace") if ended.seconds else ""
        shown = stage.shown(ended.found) or log.splitlines()[-6:]
        lines += [f"   {line[:700]}" for line in shown]
        if ended.error is not None:
            lines.append(f"   {ended.error[-1500:]}")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        return ended.error is None

    def _pack(self) -> None:
        """The whole archive or the last one, if this process is killed meanwhile."""
        made = self.packed.with_suffix(".partial")
        with tarfile.open(made, "w:gz") as archive:
            archive.add(self.folder, arcname=self.folder.name)
        made.replace(self.packed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="use a lent GPU")
    parser.add_argument("--part", type=int, choices=(1, 2), required=True, help="right, or fast")
    parser.add_argument("--seconds", type=float, default=385.0, metavar="S", help="for the part")
    words = "of a row: requests under way then count as they are"
    parser.add_argument("--row-seconds", type=float, default=75.0, metavar="S", help=words)
    parser.add_argument("--stages", nargs="+", metavar="NAME", help="only these")
    default = Path(os.environ.get("OUT", ROOT / "build"))
    parser.add_argument("--output", type=Path, default=default, metavar="DIR", help="for lease.tgz")
    parser.add_argument("--smoke", action="store_true", help="every stage at a CPU's size")
    args = parser.parse_args(arguments)
    folder = Path(tempfile.gettempdir()) / f"kvserve-lease-{args.part}"
    packed = args.output / f"lease-{args.part}.tgz"
    os.environ.setdefault("TRITON_CACHE_DIR", f"{tempfile.gettempdir()}/kvserve-lease-triton")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    args.output.mkdir(parents=True, exist_ok=True)
    todo = stages(args.part, args.smoke, args.row_seconds)
    if VARIANTS.exists() and not args.smoke:  # what is in the cache already takes no time
        arguments = ("-m", "bench.gpu_runs.precompile", "compile", str(VARIANTS))
        todo.insert(0, Stage("precompile", 100, arguments))
    lease = Lease(folder, packed, args.seconds)
    ended = [lease.run(stage) for stage in todo if not args.stages or stage.name in args.stages]
    sys.stdout.write(f"{sum(ended)} of {len(ended)} stages ended well: {packed}\n")
    return int(not all(ended))


if __name__ == "__main__":
    raise SystemExit(main())
