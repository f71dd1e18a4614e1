"""`make bench-gpu` at its smoke size: what it runs on a GPU, with what a bare machine has."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import gpu
from bench.gpu_jobs import CONFIGS, JOBS, KARA, NONE, THRESHOLD
from kvserve.benchmarks import measure
from kvserve.benchmarks.policy_spec import policy_spec
from kvserve.engine.models.spec import read_spec
from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput

ROOT = Path(__file__).resolve().parents[2]
ABSENT = [
    *("fastapi", "httptools", "llguidance", "msgspec", "orjson", "prometheus_client"),
    *("pydantic", "ray", "starlette", "uvicorn", "uvloop", "zmq"),
]


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-4b", 4.02), ("qwen3-14b", 14.77)]
)
def test_the_configs_are_of_the_published_sizes(name: str, billions: float) -> None:
    spec = read_spec(CONFIGS / name)
    heads = spec.num_heads + spec.num_kv_heads
    layer = 2 * heads * spec.head_dim * spec.hidden_size + (
        3 * spec.hidden_size * spec.intermediate_size
    )
    embeddings = (1 if spec.tied_embeddings else 2) * spec.vocab_size * spec.hidden_size
    total = spec.num_layers * layer + embeddings
    assert total / 1e9 == pytest.approx(billions, abs=0.005) and spec.dtype == "bfloat16"


def test_the_most_important_rows_come_first() -> None:
    assert [(job.policy, job.seqs, job.pool) for job in JOBS[:3]] == [
        (policy, 256, 335_000) for policy in (NONE, KARA, THRESHOLD)
    ]
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        policy_spec(job.policy), policy_spec(job.small().policy)
        of_none = [other for other in JOBS if (other.policy, other.traffic) == (NONE, job.traffic)]
        assert of_none, f"{job.name} has nothing to be compared with"


@pytest.mark.usefixtures("cpu")
def test_it_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out" / "gpu.json"
    monkeypatch.setattr(gpu, "JOBS", JOBS[:4])
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--save-result", str(path), "--seconds=0"])
    assert gpu.main() == 0  # one row, however little time there is
    assert "3 rows left: run the same command again" in capsys.readouterr().out
    first = json.loads(path.read_text())["rows"]
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--row-seconds=60"])
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


@pytest.mark.usefixtures("cpu")
def test_a_row_that_takes_too_long_counts_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of which every look takes a second."""
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=count().__next__))
    models, job = gpu.Models(), JOBS[1].small()
    row = gpu.measure(job, models, "cpu", 1e9, seconds=60)
    done, of = map(int, row["finished"].split(" of "))
    assert done < of == job.requests and row["output_tokens"] > 0 and row["output_tok_s"] > 0


def test_of_those_cut_off_nobody_knows_what_they_held() -> None:
    details = KVCacheDetails("kara", 40, 10, 20, 30, 1, 2, 3, 4)
    cut, ended = (
        RequestOutput(str(i), None, [3], [CompletionOutput(0)], kv_cache_details=each)
        for i, each in enumerate((KVCacheDetails(), details))
    )
    assert measure._held_at_end([cut])["held_over_logical_at_end"] == 0.0
    assert measure._held_at_end([cut, ended]) == measure._held_at_end([ended])


@pytest.mark.usefixtures("cpu")
def test_a_row_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no kernel image")

    path = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "JOBS", JOBS[:2])
    monkeypatch.setattr(gpu, "measure", fail)
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--save-result", str(path)])
    assert gpu.main() == 0
    rows = json.loads(path.read_text())["rows"].values()
    assert [row["error"] for row in rows] == ["RuntimeError('no kernel image')"] * 2


def test_a_bare_machine_is_enough(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); "
        "import torch; torch.cuda.is_available = lambda: False; "
        f"from bench import gpu; gpu.JOBS = gpu.JOBS[1:2]; "
        f"sys.argv = ['gpu', '--smoke', '--save-result', {str(tmp_path / 'x.json')!r}]; "
        "sys.exit(gpu.main())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "x.json").read_text())["rows"].values()
    assert "error" not in row and row["compactions"] > 10


@pytest.mark.usefixtures("cpu")
def test_without_a_gpu_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
