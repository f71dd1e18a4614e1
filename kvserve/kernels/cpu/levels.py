"""Levels of CPUs that libraries are compiled for ahead of time, as GCC's ``-march`` names them."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

# Some of the flags of each level in /proc/cpuinfo: those that tell it from the level below.
_X86 = {
    "sapphirerapids": {
        *("amx_bf16", "amx_tile", "avx512_bf16", "avx512_bitalg", "avx512_fp16", "avx512_vbmi2"),
        *("avx512_vnni", "avx512_vpopcntdq", "avx512ifma", "avx512vbmi", "avx_vnni", "gfni"),
        *("movdir64b", "movdiri", "vaes", "vpclmulqdq"),
    },
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"},
}
_ARM = {"armv8-a": {"asimd"}}
_KEYS = ("flags", "Features")


def of_this_machine() -> list[str]:
    """The levels of this kind of machine, the newest first."""
    kinds = {"x86_64": _X86, "aarch64": _ARM}
    return list(kinds.get(platform.machine(), {}))


@functools.cache
def of_this_cpu() -> tuple[str, ...]:
    """The levels that this CPU has, the newest first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    words = (line.partition(":")[2].split() for line in lines if line.startswith(_KEYS))
    flags = frozenset(next(words, ()))
    return tuple(level for level in of_this_machine() if {**_X86, **_ARM}[level] <= flags)
