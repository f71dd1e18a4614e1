"""Compiled kernels: where they are kept, and what happens if they cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvserve.kernels import build
from tests.waiting import WAIT

pytestmark = pytest.mark.compiler


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is built or loaded yet; cache and temporary folder are ``tmp_path``'s."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "temporary_folder", lambda: str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    for kept in (build.load_library, build._found, build.levels_of_this_cpu):
        kept.cache_clear()
    yield
    for kept in (build.load_library, build._found, build.levels_of_this_cpu):
        kept.cache_clear()


BUILD = "from kvserve.kernels import build; print(build.load_library('events')._name)"


def start_build(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **environment},
    )


def test_processes_that_start_at_once_share_one_build(tmp_path: Path) -> None:
    started = [start_build(XDG_CACHE_HOME=str(tmp_path)) for _ in range(2)]
    (library,) = {process.communicate(timeout=WAIT)[0].strip() for process in started}
    assert [str(file) for file in tmp_path.glob("kvserve/*")] == [library]
    without_compiler = start_build(XDG_CACHE_HOME=str(tmp_path), PATH="")
    assert without_compiler.communicate(timeout=WAIT)[0].strip() == library


def test_a_cut_build_is_made_anew(tmp_path: Path) -> None:
    """It may load, as a whole one that is of another system that shares the home does not; and the
    process ends by a bus error at the first page that is not there."""
    library = start_build(XDG_CACHE_HOME=str(tmp_path)).communicate(timeout=WAIT)[0].strip()
    whole = Path(library).read_bytes()
    for part in (0.0, 0.3, 0.6, 0.8):
        Path(library).write_bytes(whole[: int(part * len(whole))])
        again = start_build(XDG_CACHE_HOME=str(tmp_path))
        assert again.communicate(timeout=WAIT)[0].strip() == library and not again.returncode
        assert len(Path(library).read_bytes()) == len(whole)


@pytest.mark.parametrize("writable", [True, False])
def test_a_temporary_folder_serves_for_a_cache_that_is_not_one_s_own(
    tmp_path: Path, writable: bool
) -> None:
    """Others may write in it, or nobody."""
    cache = tmp_path / "cache"
    if writable:
        (cache / "kvserve").mkdir(parents=True)
        (cache / "kvserve").chmod(0o777)
    else:
        cache.touch()
    process = start_build(XDG_CACHE_HOME=str(cache), TMPDIR=str(tmp_path))
    library = Path(process.communicate(timeout=WAIT)[0].strip())
    assert library.parent == tmp_path / f"kvserve-{os.getuid()}"
    assert library.parent.stat().st_mode & 0o077 == 0


# ---- a full disk --------------------------------------------------------------------------------


def compiler_without_room(folder: Path, where: str) -> str:
    """A PATH whose g++ finds no room for files whose path has ``where``, as the real one says it.

    It notes the folder of its temporary files.
    """
    (folder / "bin").mkdir()
    script = folder / "bin" / "g++"
    script.write_text(f"""#!/bin/sh
echo "$TMPDIR" >> {folder}/temporary
case "$*" in *{where}*)
    echo "a.cpp:95:1: fatal error: error writing to /tmp/a.s: No space left on device" >&2
    exit 1
esac
exec {shutil.which("g++")} "$@"
""")
    script.chmod(0o700)
    return f"{script.parent}:{os.environ['PATH']}"


def test_a_full_disk_leaves_the_next_folder(tmp_path: Path) -> None:
    path = compiler_without_room(tmp_path, "/cache/")
    process = start_build(XDG_CACHE_HOME=str(tmp_path / "cache"), TMPDIR=str(tmp_path), PATH=path)
    library = Path(process.communicate(timeout=WAIT)[0].strip())
    assert library.parent == tmp_path / f"kvserve-{os.getuid()}"
    assert not list((tmp_path / "cache" / "kvserve").iterdir())
    # The compiler's own files are tried where the library goes, not on a third disk.
    tried = [tmp_path / "cache" / "kvserve", library.parent]
    noted = (tmp_path / "temporary").read_text().split()
    assert [Path(name).parent for name in noted] == tried and not os.path.exists(noted[1])


START = """
from kvserve import LLM
llm = LLM("kvserve/tiny", num_gpu_blocks_override=8, attention_backend="auto", dtype="float32")
for row in llm.engine.core.described().summary:
    print("|".join(row))
print(len(llm.generate("a", use_tqdm=False)))
"""


@pytest.mark.slow
def test_full_disks_leave_torch_and_the_table_says_so(tmp_path: Path) -> None:
    path = compiler_without_room(tmp_path, str(tmp_path))
    cache, others = tmp_path / "cache", {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True,
        text=True,
        timeout=WAIT,
        env={**others, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(tmp_path), "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    *lines, answers = done.stdout.splitlines()
    rows = {name: (state, why) for name, state, why in (line.split("|") for line in lines)}
    assert answers == "1" and "Traceback" not in done.stderr
    assert rows["attention"][0] == "torch"
    for feature in ("attention", "linear layers", "operators", "query log"):
        assert f"{cache}/kvserve: No space left on device" in rows[feature][1], rows[feature]
        assert "XDG_CACHE_HOME" in rows[feature][1]


# ---- compiled ahead -----------------------------------------------------------------------------


@pytest.mark.usefixtures("own_folders")
def test_what_came_with_the_package_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level, *_ = build.levels_of_this_cpu()
    made = build.prebuild("events", (), level)
    assert made.parent == tmp_path / "prebuilt"
    monkeypatch.setenv("PATH", "")
    assert build.load_library("events")._name == str(made)
    with pytest.raises(build.BuildError, match=r"no g\+\+ found"):
        build.load_library("linear")


@pytest.mark.usefixtures("own_folders")
def test_a_machine_without_a_compiler_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[str]()

    def which(name: str) -> None:
        searched.append(name)

    monkeypatch.setattr(build.shutil, "which", which)
    first = build.why_missing("events")
    count = len(searched)
    assert first is not None and "no g++ found" in first and count > 0
    assert build.why_missing("events") == first and len(searched) == count


@pytest.mark.usefixtures("own_folders")
def test_a_library_for_newer_cpus_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.Path, "read_text", lambda path: "flags\t\t: fpu avx avx2\n")
    assert build.levels_of_this_cpu() == ()
