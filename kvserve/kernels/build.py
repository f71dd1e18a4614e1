"""Compiles a C++ file of the kernels into the user's cache, once for each source and CPU.

Libraries that came with the package are taken first where they are for this CPU's level.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kvserve.entry_format import VectorForm
from kvserve.folders import cache_folder, temporary_folder

# Not -ffast-math: before GCC 13 a library linked with it turns off denormals in its process.
# The last: tuned for Zen 2 and 3, GCC fuses a product with its sum in some loops and not in others;
# a row's bits would depend on how many rows are beside it.
_FLAGS: tuple[str, ...] = (
    *("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math"),
    *("--param", "avoid-fma-max-bits=0"),
)
_LINK = ("-fopenmp", "-shared", "-fPIC")
_SECONDS = 600
"""A compiler that hangs; the largest file takes minutes on a machine that has more to do."""
_DIGEST = 32
"""Bytes behind a library that say whether it is whole: a machine may stop while it is written."""
_ROOM = 2**20
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))
_HERE = Path(__file__).parent
_HEADERS = _HERE / "cpu"
PREBUILT = _HEADERS / "prebuilt"
"""Libraries that came with the package, as in the CPU image (``kvserve.kernels.prebuild``)."""
_logger = logging.getLogger("kvserve")

# Levels of CPUs, as GCC's -march names them, and some of the flags of each in /proc/cpuinfo: those
# that tell it from the level below.
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

USUAL_DIM = 256  # of heads; attention to larger ones is compiled with:
WIDE = {False: (), True: ("KVSERVE_MAX_HEAD_DIM=512",)}


class BuildError(RuntimeError):
    """There is no library; the message says why, in one line."""


class _WrongFolder(BuildError):
    """A library cannot be kept in this folder; another one may do."""


def source_of(name: str) -> Path:
    """``name.cpp``, in a folder of kernels; what such files include is in ``cpu``."""
    return next(_HERE.glob(f"*/{name}.cpp"))


@functools.cache
def load_library(name: str, *defines: str) -> ctypes.CDLL:
    """The library of ``name.cpp``, built unless it is there. ``BuildError`` if that fails.

    ``defines``: the compiler's, as in ``KVSERVE_FORMAT=1``; each choice is a library of its own.
    """
    found = _found(name, defines, os.environ.get("PATH"), os.environ.get("XDG_CACHE_HOME"))
    if isinstance(found, str):
        raise BuildError(found)
    return found


@functools.cache
def _found(name: str, defines: tuple[str, ...], *_: str | None) -> ctypes.CDLL | str:
    """The library, or why there is none: by ``PATH`` and cache folder nothing is tried twice."""
    file = _file_name(name, defines, "native")
    there = [folder / file for folder in _cache_folders() if _is_ours(folder)]
    there += [PREBUILT / _file_name(name, defines, level) for level in levels_of_this_cpu()]
    for library in there:
        if library.is_file():
            with contextlib.suppress(BuildError):  # it is of another system that shares this home
                return _open(library)
    try:
        return _open(_build(name, defines, file))
    except BuildError as error:
        return str(error)


def defines_of(key: VectorForm, value: VectorForm) -> tuple[str, str]:
    """What ``paged_attention`` for keys and values of these forms is compiled with."""
    return f"KVSERVE_KEY={key.code}", f"KVSERVE_VALUE={value.code}"


def why_missing(name: str) -> str | None:
    """Why there is no library of ``name.cpp``; ``None`` if there is."""
    try:
        load_library(name)
    except BuildError as error:
        return str(error)
    return None


def prebuild(name: str, defines: tuple[str, ...], level: str) -> Path:
    """Compile a library into the package, for every CPU of a level. May raise ``BuildError``."""
    PREBUILT.mkdir(exist_ok=True)
    command = _command(_compiler(), name, defines, level)
    return _build_in(PREBUILT, command, _file_name(name, defines, level))


def _open(library: Path) -> ctypes.CDLL:
    data = library.read_bytes()
    if data[-_DIGEST:] != _digest(data[:-_DIGEST]):  # the process that runs it would end
        raise _WrongFolder("the build was cut")
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise _WrongFolder(f"the build does not load: {error}") from None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


def _file_name(name: str, defines: tuple[str, ...], level: str) -> str:
    """Another one for other sources, flags and, where it is compiled for this CPU, other CPUs."""
    texts = [file.read_bytes() for file in (source_of(name), *sorted(_HEADERS.glob("*.h")))]
    cpu: tuple[str, ...] = ()
    if level == "native":
        cpu = platform.machine(), *_facts("model name", "flags", "Features", "CPU part")
    flags = _FLAGS, level, defines, _LINK, cpu
    key = hashlib.sha256(b"".join(texts) + repr(flags).encode())
    return f"{name}-{key.hexdigest()[:16]}.so"


def _command(compiler: str, name: str, defines: tuple[str, ...], level: str) -> list[str]:
    given = f"-I{_HEADERS}", *(f"-D{define}" for define in defines)
    return [compiler, f"-march={level}", *_FLAGS, *given, *_LINK, str(source_of(name))]


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ found")
    return compiler


def _build(name: str, defines: tuple[str, ...], file: str) -> Path:
    """Compile into the first folder that has room and whose libraries load."""
    command = _command(_compiler(), name, defines, "native")
    refused: list[str] = []
    for folder in _cache_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(folder):
                raise _WrongFolder("others may write in it")
            _logger.info("compiling %s.cpp with g++ into %s, once", name, folder)
            return _build_in(folder, command, file)
        except (_WrongFolder, OSError) as error:
            refused.append(f"{folder}: {error.strerror if isinstance(error, OSError) else error}")
    raise BuildError(f"no folder to build in ({'; '.join(refused)}); XDG_CACHE_HOME names another")


def _build_in(folder: Path, command: list[str], file: str) -> Path:
    """Compile into a folder; several processes may do so at once, and one that ends leaves
    nothing."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as unfinished:
        library = Path(unfinished, file)
        library.touch()
        _compile([*command, "-o", str(library)], unfinished)
        with open(library, "rb+") as file_of:
            digest = _digest(file_of.read())
            file_of.write(digest)
        _open(library)
        os.replace(library, folder / file)
    return folder / file


def _compile(command: list[str], folder: str) -> None:
    """Run the compiler, whose temporary files go to ``folder`` too."""
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": folder}
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, timeout=_SECONDS, env=environment, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"g++ did not run: {error}") from None
    if done.returncode == 0:
        return
    if full := next((text for text in _FULL if text in done.stderr), None):
        raise _WrongFolder(full)
    if shutil.disk_usage(folder).free < _ROOM:  # the linker may end by a bus error
        raise _WrongFolder(_FULL[0])
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    first = next((line for line in lines if "error" in line), lines[0])
    raise BuildError(f"g++ failed: {first}")


def _cache_folders() -> tuple[Path, ...]:
    """Where builds are kept: the user's cache or, if that cannot be, a temporary folder."""
    cache, temporary = cache_folder(), Path(temporary_folder()) / f"kvserve-{os.getuid()}"
    return (temporary,) if cache is None else (cache, temporary)


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write to a folder, since its libraries are run."""
    try:
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _facts(*kinds: str) -> list[str]:
    """Different lines of these kinds that the system has of its CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(kinds)})


def levels_of_this_machine() -> list[str]:
    """The levels that libraries are compiled ahead for on such a machine, the newest first."""
    kinds = {"x86_64": _X86, "aarch64": _ARM}
    return list(kinds.get(platform.machine(), {}))


@functools.cache
def levels_of_this_cpu() -> tuple[str, ...]:
    """The levels that this CPU has, the newest first."""
    words = (line.partition(":")[2].split() for line in _facts("flags", "Features"))
    flags = frozenset(next(words, ()))
    return tuple(level for level in levels_of_this_machine() if {**_X86, **_ARM}[level] <= flags)
