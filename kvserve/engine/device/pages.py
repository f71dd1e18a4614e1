"""Settings of malloc and of the system's pages for CPU engines."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

_KEPT_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_LARGE_PAGE = 2**21
_WORTH_TRIMMING = 2**26
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of Linux's mman.h; the second since 6.1


def keep_freed_memory() -> None:
    """Let this process's malloc keep what a step on a CPU frees, up to ``_KEPT_BYTES``.

    Otherwise glibc returns large tensors to the system, and each step maps and clears their pages
    again, which takes up to a fifth of a prefill. Other C libraries are left alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Before 2.35, glibc accepts 32 MiB at most.
    if mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, 2**25):
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def use_large_pages(address: int, size: int, written: bool = True) -> None:
    """Move this range of the process's memory to large pages, as far as it fills whole ones; if it
    was not ``written`` yet, let its first writes take them.

    Weights larger than the CPU's caches are read a tenth faster, and blocks of a pool, which lie
    anywhere in it, up to a fifth. If the system has no large pages, nothing changes.
    """
    first, end = -(-address // _LARGE_PAGE), (address + size) // _LARGE_PAGE
    if first < end and sys.platform == "linux":
        advice = _MADV_COLLAPSE if written else _MADV_HUGEPAGE
        start, count = ctypes.c_void_p(first * _LARGE_PAGE), (end - first) * _LARGE_PAGE
        ctypes.CDLL(None).madvise(start, ctypes.c_size_t(count), advice)


def share_one_arena() -> None:
    """Let threads that start from now on share the first thread's malloc arena.

    glibc's ``malloc_trim`` gives back only the end of that arena, and a thread that compiles
    grammars leaves some hundred MiB in its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def resident_bytes() -> int:
    """Bytes of memory that this process holds now; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * resource.getpagesize()


def trim_memory() -> None:
    """Let malloc return unused memory to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class KeptMemory:
    """What malloc keeps after a busy time (``keep_freed_memory``), to be given back in an idle one.

    Small amounts stay, since the next step would map their pages again.
    """

    def __init__(self) -> None:
        self._least = resident_bytes()

    def give_back(self) -> None:
        """Trim if the process holds 64 MiB more than it did after the last time."""
        now = resident_bytes()
        if now - self._least > _WORTH_TRIMMING:
            trim_memory()
            self._least = resident_bytes()
        else:
            self._least = min(self._least, now)
