"""Facts about the machine of a measurement, and a process of its own for each part."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
_TAIL = 4000


def machine() -> dict[str, str]:
    """The device and its driver, the commit, and the versions of what runs on it."""
    import transformers

    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = "none"
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else f"no GPU ({platform.machine()})",
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton_version,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """KVSERVE_COMMIT, if files were copied beside another commit, or that of the checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    return os.environ.get("KVSERVE_COMMIT") or _first_line(command) or "unknown"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _first_line(command) or "none"


def _first_line(command: Sequence[str]) -> str:
    """First line of a command's output; empty if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else ""


@dataclass(frozen=True)
class Ended:
    """How a process ended: the JSON that it left, and the error if it failed."""

    seconds: float
    found: dict[str, Any]
    error: str | None


def run_apart(arguments: Sequence[str], result: Path, limit: float) -> Ended:
    """``python arguments``, which writes JSON to ``result``, in a process of its own.

    What it prints stays in a log beside ``result``.
    The process is killed with all its children after ``limit`` seconds, or when this call is
    interrupted, so that no process keeps the device. An illegal access ends only that process.
    """
    result.unlink(missing_ok=True)
    began, log = time.monotonic(), result.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.monotonic() - began
    found = json.loads(result.read_text()) if result.exists() else {}
    if code == 0:
        return Ended(seconds, found, None)
    tail = log.read_text(errors="replace")[-_TAIL:]
    how = f"took longer than {limit:.0f} s" if code is None else f"ended with status {code}"
    return Ended(seconds, found, f"{how}: {tail}")


def write_json(path: Path, value: Any) -> None:
    """Write the whole file or nothing: a process killed meanwhile leaves the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)
