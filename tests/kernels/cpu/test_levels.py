"""The compiled kernels as other CPUs would run them, and under the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.kernels.build import levels_of_this_cpu, levels_of_this_machine

TESTS = [
    *("test_paged_attention.py", "test_storage.py", "test_elementwise.py", "test_int4_log.py"),
    *("cpu/test_cpu_events.py", "cpu/test_cpu_linear_levels.py"),
    *("test_coded_attention.py", "test_remainder.py", "test_gated_delta.py"),
    "../engine/models/test_linear.py",
]
KERNELS = Path(__file__).parents[1]
SANITIZED = "-g -fsanitize=address,undefined -fno-sanitize-recover=undefined"
pytestmark = [pytest.mark.slow, pytest.mark.compiler]


def run_tests(tmp_path: Path, flags: str, **environment: str) -> str:
    """What pytest prints; kernels are built with these flags into a cache of their own."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.kernels.cpu.other_flags", "-k", "not triton and not 31_bits"]
    own = {"FURTHER_FLAGS": flags, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [*command, *(str(KERNELS / test) for test in TESTS)],
        env={**os.environ, **own, **environment},
        cwd=KERNELS.parents[1],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert list((tmp_path / "kvserve").glob("paged_attention-*.so"))
    return output


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("level", levels_of_this_machine())
def test_each_level_agrees_with_plain_indexing(level: str, tmp_path: Path) -> None:
    if level not in levels_of_this_cpu():
        pytest.skip(f"this CPU is not of level {level}")
    run_tests(tmp_path, f"-march={level}")


@pytest.mark.timeout(1200)
def test_tuning_for_another_cpu_changes_no_rule(tmp_path: Path) -> None:
    """As GCC tunes for Zen 3: rows have the bits that they have alone."""
    if "x86-64-v3" not in levels_of_this_cpu():
        pytest.skip("this CPU has no AVX2")
    run_tests(tmp_path, "-march=x86-64-v3 -mtune=znver3")


@pytest.mark.timeout(1200)
def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None
    libraries = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    preload = " ".join(library.stdout.strip() for library in libraries)
    if "/" not in preload:
        pytest.skip("g++ has no sanitizers here")
    output = run_tests(
        tmp_path, SANITIZED, LD_PRELOAD=preload, ASAN_OPTIONS="detect_leaks=0:halt_on_error=1"
    )
    assert "runtime error" not in output and "AddressSanitizer" not in output
