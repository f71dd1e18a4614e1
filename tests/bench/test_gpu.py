"""`make bench-gpu` at its smoke size: what it runs on a GPU, with what a bare machine has."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu
from bench.gpu_runs import row as gpu_row
from bench.gpu_runs.jobs import CONFIGS, JOBS, NONE
from bench.machine import Ended
from kvserve.engine.device.distributed import ALONE
from kvserve.engine.models.held import hold_levels
from kvserve.engine.models.spec import read_spec
from kvserve.engine.models.transformer import Transformer
from tests.waiting import WAIT

ROOT = Path(__file__).resolve().parents[2]
ABSENT = [
    *("fastapi", "httptools", "llguidance", "msgspec", "orjson", "prometheus_client"),
    *("pydantic", "ray", "starlette", "uvicorn", "uvloop", "zmq"),
]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU, what was checked is right, and rows run in this process, whose clock stands still."""

    def run_here(arguments: list[str], result: Path, limit: float) -> Ended:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", arguments[1:])
            try:
                gpu_row.main()
            except Exception as error:
                return Ended(1.0, {}, repr(error))
        return Ended(1.0, json.loads(result.read_text()), None)

    clock = SimpleNamespace(monotonic=lambda: 0.0, perf_counter=time.perf_counter)
    monkeypatch.setattr(gpu_row, "time", clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "wrong_parts", lambda *_: [])
    monkeypatch.setattr(gpu, "run_apart", run_here)


def test_every_row_fits_an_h100() -> None:
    """Weights, pool and 8 GB for the rest: the context, graphs, steps and events."""
    memory = 0.9 * 85.5e9
    for job in JOBS:
        spec = read_spec(CONFIGS / job.model)
        holding = hold_levels(spec, None, torch.bfloat16, "cpu", ALONE)
        model = Transformer(spec, torch.bfloat16, "meta", holding=holding)
        weights = sum(p.numel() * min(2, p.itemsize) for p in model.parameters())
        pool = (job.pool or 0) * gpu_row.bytes_per_token(job.model, "cuda")
        assert weights + pool + 8e9 < memory, f"{job.name}: {weights / 1e9:.1f} + {pool / 1e9:.1f}"


@pytest.mark.usefixtures("cpu")
def test_it_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "gpu.json"
    monkeypatch.setattr(gpu, "JOBS", (*JOBS[:3], JOBS[6]))
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--save-result", str(path), "--seconds=0"])
    assert gpu.main() == 0  # one row, however little time there is
    assert "3 rows left: run the same command again" in capsys.readouterr().out
    first = json.loads(path.read_text())["rows"]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--seconds=1e9"])
    assert gpu.main() == 0 and "all 4 rows are done" in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    (kept,) = first.values()
    none, kara, threshold, _ = rows.values()
    assert none["date"] == kept["date"] and none["ratio_to_none"] == 1.0
    for row in (kara, threshold):
        assert row["compactions"] > 10 and row["ratio_to_none"] > 0 and "error" not in row
    for row in rows.values():
        assert (
            row["graph_steps"] > 20 and row["finished"] == f"{row['requests']} of {row['requests']}"
        )
        assert row["itl_p99_ms"] >= row["itl_p50_ms"] > 0 and row["of_bandwidth"] > 0
    table = path.with_suffix(".md").read_text()
    assert table.count(f"| {NONE} |") == 2 and "torch" in table and "commit" in table


@pytest.mark.slow
def test_a_bare_machine_is_enough(tmp_path: Path) -> None:
    """A part of the check and a row, without the packages that a lent machine does not have."""
    found, row = tmp_path / "part.json", tmp_path / "row.json"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); "
        "import torch; torch.cuda.is_available = lambda: False; "
        "from bench import gpu, gpu_check; from pathlib import Path; "
        "from bench.gpu_runs import parts as gpu_parts, row as gpu_row; "
        f"gpu_parts.PARTS['logits'].run(gpu_parts.Findings(Path({str(found)!r}))); "
        f"sys.argv = ['gpu_row', {JOBS[1].small().name!r}, {str(row)!r}, '--row-seconds=60', "
        "'--smoke']; sys.exit(gpu_row.main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert json.loads(row.read_text())["compactions"] > 10
    cases = json.loads(found.read_text())["rows"]
    assert len(cases) == 2 and all(case["right"] for case in cases)
