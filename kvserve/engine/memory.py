"""How many blocks the memory holds, on the device and in the host's swap space.

And what a CPU engine asks of the system's memory.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvserve.config import EngineConfig
from kvserve.log import ConfigError
from kvserve.scheduler.layout import KVLayout

_GIB = 1024**3
_KEPT_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE_PAGE = 2**21
_MADV_COLLAPSE = 25  # of Linux 6.1's mman.h


@dataclass(frozen=True)
class Profile:
    """Bytes of a rank: the model's weights; most that a step takes beside them, tables and graphs
    among it, and events and swaps; what is left for the pool. Nothing of a step on a CPU."""

    weights: int
    step: int
    events: int
    left: int


def taken_by(run: Callable[[], None]) -> int:
    """Most bytes of this GPU that ``run`` had at once, torch's or not."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, _ = torch.cuda.mem_get_info()
    run()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    # What torch gave back meanwhile was there too.
    return before - after + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()


def free_memory(device: str, utilization: float) -> int:
    """Bytes for a rank's cache: on a GPU what ``utilization`` leaves, else all that is free."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free - (1.0 - utilization) * total)
    return _available_memory()


def keep_freed_memory() -> None:
    """Let this process's malloc keep what a step on a CPU frees, up to ``_KEPT_BYTES``.

    Else glibc returns large tensors to the system, and each step has their pages mapped and cleared
    again: up to a fifth of a prefill. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Before 2.35, glibc takes 32 MiB at most.
    if mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, 2**25):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def use_large_pages(address: int, size: int) -> None:
    """Move these bytes of this process to large pages, as many as lie in whole ones.

    Weights that no cache holds are read a tenth faster. Where the system has none, nothing changes.
    """
    first, end = -(-address // _LARGE_PAGE), (address + size) // _LARGE_PAGE
    if first < end and sys.platform == "linux":
        start, count = ctypes.c_void_p(first * _LARGE_PAGE), (end - first) * _LARGE_PAGE
        ctypes.CDLL(None).madvise(start, ctypes.c_size_t(count), _MADV_COLLAPSE)


def count_blocks(
    config: EngineConfig, layout: KVLayout, itemsize: int, max_len: int, free: int, device: str
) -> int:
    """Blocks of the pool, the null block included; never more than could be used at once.

    ``layout`` is a rank's, and ``free`` bytes are what every rank could give.
    """
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override + 1
    memory = config.cache.kv_cache_memory
    if memory is None:
        # Ranks on a CPU share its memory.
        share = free // (4 * config.parallel.tensor_parallel_size)
        memory = free if device == "cuda" else min(_GIB, share)
    block_bytes = layout.block_elements * itemsize
    affordable = memory // block_bytes
    if affordable < 2:
        raise ConfigError(
            f"--kv-cache-memory: {memory} bytes do not hold two blocks of {block_bytes} bytes"
        )
    usable = config.scheduler.max_num_seqs * layout.blocks_for(max_len) * 2
    return int(min(affordable, usable + 1))


def count_host_blocks(config: EngineConfig, block_bytes: int, num_blocks: int) -> int:
    """Blocks of the swap space, the null block aside; ``block_bytes`` are those of all ranks."""
    space = config.cache.swap_space
    if space is None:
        return min(num_blocks - 1, 4 * _GIB // block_bytes)
    return int(space * _GIB) // block_bytes


def _available_memory() -> int:
    """Bytes the machine could still give; where it does not say, assume 4 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return kib * 1024
    except (OSError, StopIteration):
        return 4 * _GIB
