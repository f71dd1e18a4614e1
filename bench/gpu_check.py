"""Checks correctness on this GPU: tokens, graphs, waits, logits and kernels, in under ten minutes.

    make gpu-check ARGS="--save-result bench/results/DATE-gpu-check-H200.json"

Needs torch, Triton, numpy, transformers, tokenizers and safetensors; kvserve's other dependencies
are not needed. Each part runs in a process of its own with a time limit, leaves a log, and is saved
(JSON, and a Markdown table beside it) when it ends. The exit status is 0 only if all parts are
right. Without a GPU the parts run on the CPU at a small size, as far as they can, and report what
they left out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from bench.gpu_runs.parts import PARTS, Part
from bench.machine import ROOT, Ended, machine, run_apart, write_json

_AT_ONCE = 10
CHECKED = ROOT / "build" / "gpu-check.json"


def verdict(part: Part, ended: Ended) -> dict[str, Any]:
    """A part's entry: right only if it ended, has rows or says what it left out, and no row is
    wrong."""
    rows = ended.found.get("rows", [])
    left_out = ended.found.get("left_out", [])
    right = ended.error is None and all(row["right"] for row in rows) and bool(rows or left_out)
    entry = {"what": part.what, "right": right, "seconds": round(ended.seconds, 1)}
    return {**entry, "rows": rows, "left_out": left_out, "error": ended.error}


def table(found: dict[str, Any]) -> str:
    """Markdown: a line for each part, then its rows."""
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    lines = [f"{about}.", "", "| part | | seconds | |", "|---|---|---:|---|"]
    for name, part in found["parts"].items():
        state = "right" if part["right"] else "**WRONG**"
        if part["right"] and not part["rows"]:
            state = "not run"
        lines.append(f"| {name} | {part['what']} | {part['seconds']:.0f} | {state} |")
    for name, part in found["parts"].items():
        lines += ["", f"**{name}**", "", "| | | |", "|---|---|---|"]
        for row in part["rows"]:
            state = "right" if row["right"] else "**WRONG**"
            lines.append(f"| {row['case']} | {state} | {_oneline(row.get('found', ''))} |")
        lines += [f"| {what} | not run | |" for what in part["left_out"]]
        if part["error"]:
            lines += ["", "```", part["error"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _oneline(text: Any) -> str:
    return " ".join(str(text).split()).replace("|", "/")[:300]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="is everything right on this GPU?")
    words = "JSON; a table is written beside it (default: build/gpu-check.json)"
    parser.add_argument("--save-result", type=Path, default=CHECKED, metavar="FILE", help=words)
    words = f"only these parts, of {', '.join(PARTS)} (default: all)"
    parser.add_argument(
        "--part", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=words
    )
    words = "begin no part after so long (default: 560)"
    parser.add_argument("--seconds", type=float, default=560.0, metavar="S", help=words)
    return parser.parse_args()


def check(parts: list[str], path: Path, seconds: float) -> bool:
    """Run ``parts`` and save each to ``path`` when it ends; returns whether all of them are right.

    Most of them run side by side. After ``seconds`` no further part is started, and a part that was
    not started is not right.
    """
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "parts": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        # The parts' kernels run in Triton's interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        sys.stdout.write("torch sees no CUDA device: what a CPU can show, and no more\n")

    def run(name: str) -> None:
        part, left = PARTS[name], seconds - (time.monotonic() - began)
        ended = Ended(0.0, {}, "no time was left for it")
        if left > 0:
            result = path.with_name(f"{path.stem}-{name}.json")
            command = ["-m", "bench.gpu_runs.parts", name, str(result)]
            ended = run_apart(command, result, min(left, part.limit))
            result.unlink(missing_ok=True)
        with saving:
            found["parts"][name] = entry = verdict(part, ended)
            write_json(path, found)
            path.with_suffix(".md").write_text(table(found))
            say(name, entry)

    saving = Lock()
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        list(pool.map(run, [name for name in parts if not PARTS[name].alone]))
    for name in parts:
        if PARTS[name].alone:
            run(name)
    return all(part["right"] for part in found["parts"].values())


def main() -> int:
    args = parse_arguments()
    right = check(args.part, args.save_result, args.seconds)
    written = args.save_result.with_suffix(".md")
    sys.stdout.write(f"{written}: {'all right' if right else 'NOT ALL RIGHT'}\n")
    return int(not right)


def say(name: str, part: dict[str, Any]) -> None:
    """Print a line for a part, and one for each case that was wrong, left out or is a choice."""
    state = "right" if part["right"] else "WRONG"
    lines = [f"{name}: {state} in {part['seconds']:.0f} s, {len(part['rows'])} cases"]
    for row in part["rows"]:
        if not row["right"] or row.get("choice"):
            lines.append(f"  {row['case']}: {row.get('found', '')}")
    lines += [f"  not run: {what}" for what in part["left_out"]]
    if part["error"]:
        lines.append(f"  {part['error']}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
