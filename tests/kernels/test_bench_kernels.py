"""What bench/kernels.py would measure is right, and without a GPU it says that it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels as bench
from bench.kernel_rows import cases as kernel_cases
from bench.kernel_rows.cases import Setting
from bench.kernel_rows.model_cases import all_cases
from bench.kernel_rows.targets import EVENT
from kvserve.entry_format import FORMATS
from kvserve.kernels.dispatch import Kernel
from kvserve.scheduler.layout import Granularity
from tests.checkpoints import random_prompts
from tests.meta_device import DRAWN, GREEDY, KARA, small_engine
from tests.thinning import slow
from tests.waiting import WAIT

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.parametrize("granularity", Granularity)
def test_cases_agree_with_their_references(granularity: Granularity, device: str) -> None:
    setting = tiny(granularity, device)
    found = bench.differences(setting)
    assert not [kernel for kernel, difference in found.items() if not difference.right], found
    assert {*EVENT, "decode", "prefill", "sample", "filter and sample"} <= set(found)


@pytest.mark.device
@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("form", ["auto", *slow(*FORMATS)])
def test_what_kara_launches_is_checked(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel of a run of Kara's default, in the form that it has there."""
    launched: set[Any] = set()

    def launch(kernel: Kernel, grid: Any, *args: Any, **options: Any) -> None:
        kinds = [
            "SHARES",
            "CHUNKED",
            "KEYS",
            "VALUES",
            "KEY",
            "VALUE",
            "FORM",
            "INT4",
            "SEEN",
            "ADDS",
        ]
        form = tuple((name, options[name]) for name in kinds if name in options)
        launched.add((kernel.source.__name__, form))

    monkeypatch.setattr(Kernel, "launch", launch)
    llm = small_engine(tmp_path, KARA, kv_cache_dtype=form)
    llm.generate(random_prompts([5, 17, 33]), [GREEDY, DRAWN, GREEDY], use_tqdm=False)
    by_kara, launched = launched, set()
    for case in all_cases(tiny(Granularity.MODEL, "cpu")):
        case.triton()
    assert len(by_kara) > 10
    assert not by_kara - launched, f"not among the cases: {by_kara - launched}"


def tiny(granularity: Granularity, device: str) -> Setting:
    return Setting("smoke", granularity, 70, 2, torch.float32, device, kernel_cases.SMOKE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_no_figure() -> None:
    absent = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'fastapi', 'transformers']))"
    )
    script = (
        f"{absent}; sys.argv = ['kernels.py']; from bench.kernels import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not done.stdout
