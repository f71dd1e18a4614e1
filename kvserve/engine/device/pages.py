"""What a CPU engine asks of the system's memory."""

from __future__ import annotations

import ctypes
import sys

_KEPT_BYTES = 2**28
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGE_PAGE = 2**21
_MADV_COLLAPSE = 25  # of Linux 6.1's mman.h


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
