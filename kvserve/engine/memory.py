"""How much memory a device could still give."""

from __future__ import annotations

from pathlib import Path

import torch

_GIB = 1024**3


def free_memory(device: str, utilization: float) -> int:
    """Bytes for a rank's cache: on a GPU what ``utilization`` leaves, else all that is free."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free - (1.0 - utilization) * total)
    return _available_memory()


def _available_memory() -> int:
    """Bytes the machine could still give; where it does not say, assume 4 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return kib * 1024
    except (OSError, StopIteration):
        return 4 * _GIB
