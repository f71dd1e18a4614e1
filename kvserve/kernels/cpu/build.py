"""Compiles a C++ file of this folder into the user's cache, once for each source and CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvserve.folders import temporary_folder

# Not -ffast-math: before GCC 13 a library linked with it turns off denormals in its process.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
_LINK = ("-fopenmp", "-shared", "-fPIC")
_SECONDS = 120
_ROOM = 2**20
_logger = logging.getLogger("kvserve")
_failures: dict[tuple[object, ...], str] = {}
"""Why a build failed, so that the next call does not wait for the same compiler again."""


class BuildError(RuntimeError):
    """There is no library; the message says why, in one line."""


@functools.cache
def load_library(name: str, *defines: str) -> ctypes.CDLL:
    """The library of ``name.cpp``, built unless it is cached. ``BuildError`` if that fails.

    ``defines``: the compiler's, as in ``KVSERVE_FORMAT=1``; each choice is a library of its own.
    """
    source = Path(__file__).with_name(f"{name}.cpp")
    texts = [file.read_bytes() for file in (source, *sorted(source.parent.glob("*.h")))]
    flags = *_FLAGS, *(f"-D{define}" for define in defines)
    key = hashlib.sha256(b"".join(texts) + repr((flags, _LINK, _cpu())).encode())
    file = f"{name}-{key.hexdigest()[:16]}.so"
    for folder in _cache_folders():
        if (folder / file).is_file() and _is_ours(folder):
            with contextlib.suppress(BuildError):  # it is of another system that shares this home
                return _open(folder / file)
    attempt = file, shutil.which("g++"), _cache_folders()
    if attempt not in _failures:
        try:
            return _open(_build(source, file, flags))
        except BuildError as error:
            _failures[attempt] = str(error)
    raise BuildError(_failures[attempt])


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the build does not load: {error}") from None


def _build(source: Path, file: str, flags: tuple[str, ...]) -> Path:
    """Compile into the first folder that can be written; several processes may do so at once."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise BuildError("no g++ found")
    failure = None
    for folder in _cache_folders():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_ours(folder):
                continue
            handle, unfinished = tempfile.mkstemp(dir=folder, suffix=".so")
        except OSError:
            continue
        os.close(handle)
        _logger.info("compiling %s with g++ into %s, once", source.name, folder)
        try:
            _compile([compiler, *flags, *_LINK, "-o", unfinished, str(source)])
            _open(Path(unfinished))
            os.replace(unfinished, folder / file)
        except BaseException as error:
            os.unlink(unfinished)
            if not (isinstance(error, BuildError) and _no_room(folder)):
                raise
            failure = error
            continue
        return folder / file
    if failure is not None:
        raise failure
    raise BuildError(f"no folder to build in: {', '.join(map(str, _cache_folders()))}")


def _no_room(folder: Path) -> bool:
    """Whether the disk behind a folder is as good as full."""
    return shutil.disk_usage(folder).free < _ROOM


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"g++ did not run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"g++ failed: {first}")


def _cache_folders() -> tuple[Path, Path]:
    """Where builds are kept: the user's cache or, if that cannot be written, a temporary folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(temporary_folder()) / f"kvserve-{os.getuid()}"
    # Without a home the path stays relative.
    return (Path(cache, "kvserve") if os.path.isabs(cache) else temporary), temporary


def _is_ours(folder: Path) -> bool:
    """Whether only this user can write to a folder, since its libraries are run."""
    facts = folder.stat()
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _cpu() -> tuple[str, ...]:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    return platform.machine(), *sorted({line for line in lines if line.startswith(kinds)})
