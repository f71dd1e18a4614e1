"""Every Triton kernel compiles without a GPU and stays within registers and shared memory.

``python -m tests.kernels.compile_kernels --write`` makes what they need now the budget.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")

HERE = Path(__file__).parents[1]
BUDGETS: dict[str, dict[str, dict[str, dict[str, int]]]]
BUDGETS = json.loads((HERE / "budget.json").read_text())
if triton.__version__ not in BUDGETS:
    reason = f"{HERE.name}/budget.json knows Triton {', '.join(BUDGETS)}, not {triton.__version__}"
    pytest.skip(reason, allow_module_level=True)
BUDGET = BUDGETS[triton.__version__]
# Together they launch every kernel.
NAMES = {
    "entries": [
        *("compact_kv", "store_kv", "gather_keys", "rotate_and_store", "decode_inputs"),
        *("store_levels", "gather_levels", "move_levels"),
        *("store_few/k3v3", "gather_few/k3v3", "move_few/k3v3", "turn_heads"),
    ],
    "attention": ["prefill", "decode/split", "decode/codes", "decode/k4v4"],
    "scores": [
        *("window_scores", "centre_scores", "token_to_chunk"),
        *("store_queries/int4", "gather_queries/int4", "window_scores/int4"),
    ],
    "layers": [
        *("rms_norm", "rotate", "silu_and_mul", "quantize_rows", "sample_tokens"),
        *("multiply_levels", "widen_levels", "delta_rule/steps", "delta_rule/pieces"),
    ],
}


DECODE_LEVELS = {"int8": 700, "k8v4": 580, "fp8": 960, "k4v4": 550, "k3v3": 640, "k2v2": 540}


def compiled(tmp_path: Path, *arguments: str, triton_at: Path | None = None) -> Any:
    """In a process of its own: the interpreter's kernels, which tests run, cannot be compiled.

    ``triton_at``: a folder with another Triton than the installed one.
    """
    without = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton_at is not None:
        without["PYTHONPATH"] = os.pathsep.join([str(triton_at), without.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_kernels", *arguments, "--ptx", str(tmp_path)],
        env=without | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_within_budget(costs: Any, version: str = triton.__version__) -> None:
    budget = BUDGETS[version]
    over = [
        f"{name} {arch}: {what} {count}, budget {budget[name][arch][what]}"
        for name, archs in costs.items()
        for arch, cost in archs.items()
        for what, count in cost.items()
        if count > budget[name][arch][what]
    ]
    assert not over, "\n".join(over)


def test_nothing_is_allowed_to_spill() -> None:
    spilling = [
        (version, name)
        for version, costs in BUDGETS.items()
        for name, archs in costs.items()
        if any(cost["spilled"] for cost in archs.values())
    ]
    assert not spilling


@pytest.mark.parametrize(
    ("variant", "most"),
    [
        ("decode:attend", 1150),
        *(("decode/block16:attend", 720), ("decode/newest:attend", 960)),
        *((f"decode/{form}:decode_levels", most) for form, most in DECODE_LEVELS.items()),
        ("prefill:attend", 2800),  # 700 of each of 8 warps for a tile of 64
    ],
)
def test_attention_issues_few_instructions(variant: str, most: int) -> None:
    """Warp instructions for 32 entries of a KV head, beside the cycles that memory takes for them
    on an H100: 1,133 (numbers), 575 (int8, fp8), 438 (k8v4), 288 (k4v4), 217 (k3v3), 146 (k2v2), at
    some two instructions a cycle."""
    for version, costs in BUDGETS.items():
        issued = costs[variant]["sm_90"]["loop 1"]
        assert issued <= most, f"Triton {version}"


def test_products_with_levels_issue_few_instructions() -> None:
    """For 32 weights of 4 bits of each lane. Widened one by one, in float32, they took 348, and 628
    in two tiles of 64 rows."""
    most = {"": 210, "/rows1": 130, "/rows32": 175, "/rows64_few": 210, "/rows64": 165}
    for version, costs in BUDGETS.items():
        for rows, count in (most | {"/rows128": 175}).items():
            issued = costs[f"multiply_levels{rows}:multiply_levels"]["sm_90"]["loop 1"]
            assert issued <= count, f"{rows}, Triton {version}"


def kernels_of(names: Iterable[str]) -> set[str]:
    return {name.partition(":")[2] for name in names}


def test_every_kernel_is_compiled() -> None:
    tried = {variant for names in NAMES.values() for variant in names}
    assert kernels_of(BUDGET) == kernels_of(
        name for name in BUDGET if name.partition(":")[0] in tried
    )


@pytest.mark.device
@pytest.mark.slow
def test_the_newest_cards_have_less_shared_memory(tmp_path: Path) -> None:
    costs = compiled(tmp_path, "--arch", "120", "--name", "prefill", "prefill/dim256")
    assert all(cost["sm_120"]["shared"] <= 99 * 1024 for cost in costs.values()), costs


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("what", NAMES)
def test_a_variant_of_each_kernel(what: str, tmp_path: Path) -> None:
    costs = compiled(tmp_path, "--arch", "90", "--name", *NAMES[what])
    assert set(costs) == {name for name in BUDGET if name.partition(":")[0] in NAMES[what]}
    assert_within_budget(costs)
    if what == "entries":
        # A rotation's two products are rounded each, as torch rounds them.
        assert "fma.rn" not in ptx(tmp_path, "rotate_and_store", "rotate_and_store")
    if what == "scores":
        # Levels are rounded as the reference rounds them: first the product, then the sum with a
        # half.
        rounded = ptx(tmp_path, "store_queries-int4", "store_int4")
        assert "fma.rn" not in rounded and "div.full" not in rounded and "div.rn.f32" in rounded
    if what == "layers":
        # Sampling divides as torch does, and takes no logarithm that is wrong near 1.
        assert "lg2.approx" not in ptx(tmp_path, "sample_tokens", "draw")
        for kernel in ("survey", "pick", "draw"):
            assert "div.rn.f32" in ptx(tmp_path, "sample_tokens", kernel), kernel
        assert "fma.rn" not in ptx(tmp_path, "rotate", "rotate")


def ptx(folder: Path, variant: str, kernel: str) -> str:
    return (folder / f"{variant}-{kernel}-sm_90.ptx").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
@pytest.mark.parametrize("version", list(BUDGETS))
def test_all_variants(tmp_path: Path, version: str, arch: str) -> None:
    folder = None
    if version != triton.__version__:
        folder = HERE.parents[1] / f".triton-{version}"
        if not folder.is_dir():
            pytest.skip(f"pip install --target {folder.name} --no-deps triton=={version}")
    costs = compiled(tmp_path, "--arch", arch, triton_at=folder)
    budget = BUDGETS[version]
    assert set(costs) == {name for name, archs in budget.items() if f"sm_{arch}" in archs}
    assert_within_budget(costs, version)
