"""What the machine has left: how many blocks its memory holds, on the device and in the host's swap
space, and how many threads a CPU engine takes.

More threads than free cores cost a multiple of what they save: each parallel loop waits for its
slowest thread, several times a layer. So the engine takes as many as are idle at start-up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvserve.config import CacheConfig
from kvserve.engine.messages import Row
from kvserve.log import ConfigError

GIB = 1024**3
_SECONDS = 0.2
_IDLE = (3, 4)
"""Columns of /proc/stat in which a core does nothing, or waits for a disk."""


@dataclass(frozen=True)
class Profile:
    """How a rank's memory is used, in bytes.

    ``weights`` are the model's; ``step`` is the most that a step takes besides them, tables and
    graphs included; ``events`` is reserved for events and swaps; ``left`` is for the pool. Where
    no step is measured, as on a CPU, ``step`` and ``events`` are 0.
    """

    weights: int
    step: int
    events: int
    left: int

    @property
    def row(self) -> Row:
        """The start-up table's row: what a rank's memory holds besides the pool."""
        weights, step, events = (
            f"{size / 2**20:.0f} MiB" for size in (self.weights, self.step, self.events)
        )
        if not self.step:
            return "memory", f"weights {weights}", "a step is measured only to size a GPU's pool"
        state = f"weights {weights}, a step {step}, events and swaps {events}"
        return "memory", state, "measured before the pool; --gpu-memory-utilization"


def taken_by(run: Callable[[], None]) -> int:
    """Peak memory of ``run`` on this GPU, in bytes, torch's and other libraries'."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, _ = torch.cuda.mem_get_info()
    run()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    # Memory that torch has given back since its peak counts too.
    return before - after + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()


def free_memory(device: str, utilization: float) -> int:
    """Bytes for a rank's cache: on a GPU what ``utilization`` leaves, else all that is free."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free - (1.0 - utilization) * total)
    return _available_memory()


def check_pool(cache: CacheConfig, block_bytes: int, free: int, sharing: int = 1) -> None:
    """``ConfigError`` if the pool asked for does not fit ``free`` bytes, of ``sharing`` ranks.

    On a CPU it is checked before anything is loaded: the system would grant the addresses and kill
    the process once it used them. A GPU's memory is known when the weights are there.
    """
    blocks, wanted, flag = cache.num_gpu_blocks_override, 0, "--num-gpu-blocks-override"
    if blocks is not None:
        wanted = (blocks + 1) * block_bytes
    elif cache.kv_cache_memory is not None:
        wanted, flag = cache.kv_cache_memory, "--kv-cache-memory"
    if wanted * sharing > free:
        raise ConfigError(
            f"{flag}: a pool of {wanted * sharing / GIB:.1f} GiB is more than the {free / GIB:.1f} "
            "GiB of memory that are free"
        )


def check_length(max_len: int, head_dim: int, max_num_seqs: int, free: int) -> None:
    """``ConfigError`` if what is made for each place of a sequence of ``max_len`` tokens does not
    fit ``free`` bytes: the tables of RoPE, in 32 bits while they are computed, and a list of tokens
    for each row, of whose memory only what is written is taken."""
    wanted = 16 * max_len * head_dim
    if wanted > free or max_len * max_num_seqs > 2**40:
        raise ConfigError(
            f"--max-model-len: tables for sequences of {max_len} tokens do not fit into the "
            f"{free / GIB:.1f} GiB of memory that are free; if it is not given, it is what "
            "config.json says (max_position_embeddings)"
        )


def count_blocks(cache: CacheConfig, usable: int, block_bytes: int, usual: int) -> int:
    """Blocks of the pool, the null block included: what is asked for, else those of ``usual``
    bytes; never more than the ``usable`` ones that sequences could hold at once."""
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override + 1
    memory = usual if cache.kv_cache_memory is None else cache.kv_cache_memory
    affordable = memory // block_bytes
    if affordable < 2:
        raise ConfigError(
            f"--kv-cache-memory: {memory} bytes do not hold two blocks of {block_bytes} bytes"
        )
    return int(min(affordable, usable + 1))


def count_host_blocks(cache: CacheConfig, block_bytes: int, num_blocks: int) -> int:
    """Blocks of the swap space, the null block aside; ``block_bytes`` are those of all ranks."""
    space = cache.swap_space
    if space is None:
        return min(num_blocks - 1, 4 * GIB // block_bytes)
    return int(space * GIB) // block_bytes


def _available_memory() -> int:
    """Bytes that the machine, or the container, has available; 4 GiB if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 4 * GIB
    return min(kib * 1024, _left_in_group(Path("/sys/fs/cgroup")))


def _left_in_group(group: Path) -> int:
    """Bytes left below the limit of a control group (version 2); 2**63 without a limit."""
    try:
        limit, used = (group / "memory.max").read_text(), (group / "memory.current").read_text()
        return max(int(limit) - int(used), 0)
    except (OSError, ValueError):
        return 2**63


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
    after, idle = _core_times(), 0.0
    for core in cores:  # an unknown one counts as idle
        spent = [b - a for a, b in zip(before.get(core, ()), after.get(core, ()), strict=True)]
        total = sum(spent)
        idle += sum(spent[column] for column in _IDLE) / total if total else 1.0
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
