"""How many threads a CPU engine takes, on a machine that may be busy with other work.

More threads than free cores cost a multiple of what they save: each parallel loop waits for its
slowest thread, several times a layer. So the engine takes as many as are idle at start-up.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

_SECONDS = 0.2
_IDLE = (3, 4)
"""Columns of /proc/stat in which a core does nothing, or waits for a disk."""


def limit_threads(ranks: int = 1) -> tuple[str, str]:
    """Set torch's number of threads, which the compiled kernels share; returns it and the reason.

    It never exceeds torch's own choice, and OMP_NUM_THREADS takes precedence. ``ranks`` processes
    share the cores equally.
    """
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in os.environ:
        return str(threads), "OMP_NUM_THREADS"
    if threads == 1:
        return "1", "as torch was set; OMP_NUM_THREADS"
    cores = _cores()
    before = _core_times()
    time.sleep(_SECONDS)
    idle = _idle_cores(before, _core_times(), cores)
    threads = max(1, min(threads, _quota(), round(idle)) // ranks)
    torch.set_num_threads(threads)
    return str(threads), f"{idle:.1f} of {len(cores)} cores were idle at start-up; OMP_NUM_THREADS"


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _quota() -> int:
    """Whole cores that a container's limit allows; all of them without a limit."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return os.cpu_count() or 1


def _core_times() -> dict[int, list[int]]:
    """Ticks of each core since it started, by what it did; empty where the system does not say."""
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return {}
    found = (line for line in lines if line and line[0][:3] == "cpu" and line[0][3:].isdigit())
    return {int(line[0][3:]): [int(ticks) for ticks in line[1:]] for line in found}


def _idle_cores(
    before: dict[int, list[int]], after: dict[int, list[int]], cores: set[int]
) -> float:
    """How many of ``cores`` were idle between two measurements; an unknown one counts as idle."""
    idle = 0.0
    for core in cores:
        spent = [b - a for a, b in zip(before.get(core, ()), after.get(core, ()), strict=True)]
        total = sum(spent)
        idle += sum(spent[column] for column in _IDLE) / total if total else 1.0
    return idle
