"""What bench/kernels.py would measure is right, and without a GPU it says that it cannot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import kernels as bench
from kvserve.scheduler.layout import Granularity

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_cases_agree_with_their_references(
    granularity: Granularity, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.SHAPES, "tiny", (4, 2, 16))
    for name, value in (("BLOCK", 16), ("WINDOW", 40), ("KEPT", 12), ("BUFFER", 8)):
        monkeypatch.setattr(bench, name, value)
    setting = bench.Setting("tiny", granularity, 70, 2, torch.float32, device, layers=2)
    kernels = {"decode", "prefill", "store", "gather", "window scores", "compact"}
    assert set(bench.differences(setting)) == kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_there_is_no_figure() -> None:
    absent = (
        "import sys; sys.modules.update(dict.fromkeys(['pydantic', 'fastapi', 'transformers']))"
    )
    script = (
        f"{absent}; sys.argv = ['kernels.py']; from bench.kernels import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "no CUDA device" in done.stderr
    assert not done.stdout
