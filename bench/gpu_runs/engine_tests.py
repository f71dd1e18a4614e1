"""Runs the tests of engines and kernels on a GPU, a process for each group, all at once.

    python -m bench.gpu_runs.engine_tests FILE [--seconds S] [--groups NAME ...]

These tests compare whole engines with transformers and with dense float64 passes: every policy,
layout, form of entries, family of models and way to store weights. They are written for CPUs, so
engines get small pools, blocks of 16 tokens, few graphs and steps that do not overlap, unless a
test says otherwise. Products that are the same in every batch, bit for bit, are a CPU's alone. A
test that names what a CPU alone does fails here; FILE says why.

As a plug-in of pytest (``-p bench.gpu_runs.engine_tests``) it writes each outcome down at once: a
group that is cut off keeps what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT, write_json

_ENGINE = {"kv_cache_memory": 1 << 28, "block_size": 16, "async_scheduling": False}
_CAPTURED = 8
_OUTCOMES = "BENCH_TEST_OUTCOMES"
_LAB = "tests/engine/policies/test_conformance.py"
_SPECS = (
    *("llama-model-auto", "qwen3-head-auto", "qwen3-model-k4v4", "llama-layer-auto"),
    *("llama-head-k4v4", "qwen3-layer-k4v4", "qwen3-model-k8v4", "llama-head-int8"),
    "qwen3-layer-fp8",
)
GROUPS: dict[str, list[str]] = {
    **{
        f"policies-{spec}": [_LAB, "-k", f"{spec} and not test_chunks and not test_hits"]
        for spec in _SPECS
    },
    "policies-uneven": ["tests/engine/policies/uneven", "tests/engine/policies/test_kara.py"],
    "policies-windows": ["tests/engine/policies/test_other_layers.py", "-k", "gpt-oss or gemma3"],
    "policies-others": [
        *("tests/engine/policies/test_pyramidinfer.py", "tests/engine/policies/test_spindlekv.py"),
        "tests/engine/compression",
    ],
    "models": ["tests/engine/models/test_models.py"],
    "quantized": [
        *("tests/engine/models/test_models_quantized.py", "tests/engine/models/test_models_fp8.py")
    ],
    "borrowed": [
        *("tests/engine/models/test_borrowed.py", "tests/engine/models/test_wrapper.py"),
        "tests/engine/models/test_experts.py",
    ],
    "hybrids": ["tests/engine/models/test_hybrids.py"],
    "parity": ["tests/engine/test_parity.py"],
    "pressure": [
        *("tests/engine/test_pressure.py", "tests/engine/runner/test_continuations.py"),
        *("-k", "not in_a_crowd and not rank"),
    ],
    "crowds": ["tests/engine/test_pressure.py", "-k", "in_a_crowd"],
    "cache": ["tests/engine/cache", "tests/engine/sampling/test_logprobs.py"],
    "kernels-entries": [
        *(f"tests/kernels/test_{name}.py" for name in ("quantized_entries", "storage", "int4_log"))
    ],
    "kernels-attention": [
        *(f"tests/kernels/test_{name}.py" for name in ("paged_attention", "coded_attention"))
    ],
    "kernels-others": [
        "tests/kernels/on_triton",
        "--deselect=tests/kernels/on_triton/test_triton_compile.py",
        *(f"tests/kernels/test_{name}.py" for name in ("elementwise", "decode_inputs")),
        *(f"tests/kernels/test_{name}.py" for name in ("remainder", "gated_delta")),
        "tests/kernels/test_centre_scores.py",
        *(f"tests/kernels/test_{name}.py" for name in ("window_scores", "absolute_scores")),
    ],
}
_QUICK = ("kernels", "pressure", "cache", "policies-uneven", "policies-windows", "policies-others")
"""Groups without their slow tests, and without those that compile for a CPU."""


def pytest_configure(config: pytest.Config) -> None:
    """Engines of one GPU, side by side: as much memory as they have on a CPU, or little."""
    from kvserve.config import EngineConfig
    from kvserve.engine.runner import cuda_graph

    made = EngineConfig.from_flat.__func__  # type: ignore[attr-defined]
    sized = {"kv_cache_memory", "num_gpu_blocks_override", "gpu_memory_utilization"}

    def from_flat(cls: Any, **settings: Any) -> Any:
        given: dict[str, Any] = dict(_ENGINE)
        if settings.get("device", "auto") == "cpu" or sized & settings.keys():
            del given["kv_cache_memory"]
        return made(cls, **{**given, **settings})

    cuda_graph.LARGEST = _CAPTURED
    EngineConfig.from_flat = classmethod(from_flat)  # type: ignore[method-assign,assignment]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    entry = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
    if report.failed:
        entry["error"] = str(report.longrepr)[-2500:]
    with open(os.environ[_OUTCOMES], "a") as file:
        file.write(json.dumps(entry) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="the tests of engines and kernels on this GPU")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=150.0, metavar="S", help="for all of them")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    args = parser.parse_args()
    folder, until = Path(tempfile.mkdtemp()), time.monotonic() + args.seconds
    running = {name: _start(name, folder) for name in args.groups}
    found: dict[str, Any] = {}
    while running:
        time.sleep(0.5)
        late = time.monotonic() > until
        for name, process in list(running.items()):
            if late:
                process.kill()
            if late or process.poll() is not None:
                found[name] = _outcomes(name, folder) | {"status": process.wait()}
                del running[name]
                write_json(args.file, {"groups": found})
                counts = ", ".join(f"{n} {outcome}" for outcome, n in found[name]["counts"].items())
                sys.stdout.write(f"{name}: {counts}{', cut off' * late}\n")
                sys.stdout.flush()
    return 0


def _start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    marks = "not ray"
    if name.startswith(_QUICK):
        marks += " and not slow and not device and not compiler"
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "--tb=short"]
    if "-k" not in GROUPS[name]:
        options += ["-k", "not rank"]  # which need a GPU each
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "bench.gpu_runs.engine_tests"),
            *(*options, *GROUPS[name]),
        ],
        cwd=ROOT,
        env=os.environ | {_OUTCOMES: str(folder / name), "OMP_NUM_THREADS": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def _outcomes(name: str, folder: Path) -> dict[str, Any]:
    file = folder / name
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    log = (folder / f"{name}.log").read_text(errors="replace")
    failed = [row for row in rows if row["outcome"] == "failed"]
    counts = dict(Counter(row["outcome"] for row in rows))
    slowest = sorted(rows, key=lambda row: -row["seconds"])[:5]
    return {"counts": counts, "failed": failed, "slowest": slowest, "log": log[-1500:]}


if __name__ == "__main__":
    raise SystemExit(main())
