"""`make bench-gpu` at its smoke size: what it runs on a GPU, with what a bare machine has."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu
from bench.gpu_runs import row as gpu_row
from bench.gpu_runs.jobs import CONFIGS, JOBS, KARA, NONE, THRESHOLD, Job
from bench.harness.measuring import measure
from bench.harness.setup.policy_spec import policy_spec
from bench.machine import Ended
from kvserve.engine.device.distributed import ALONE
from kvserve.engine.models.held import hold_levels
from kvserve.engine.models.transformer import Transformer
from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput
from tests.checkpoints import read_spec
from tests.waiting import WAIT

ROOT = Path(__file__).resolve().parents[2]
KARA_SMALL = JOBS[1].small().policy
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
    by_form = [(job.label, job.traffic) for job in JOBS[3:7]]
    labels = "none@k8v4", "kara@k8v4", "none@k4v4", "kara@k4v4"
    assert by_form == [(label, JOBS[0].traffic) for label in labels]
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        policy_spec(job.policy), policy_spec(job.small().policy)
        of_none = [other for other in JOBS if (other.policy, other.traffic) == (NONE, job.traffic)]
        assert of_none, f"{job.name} has nothing to be compared with"


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
    monkeypatch.setattr(gpu, "JOBS", (*JOBS[:3], JOBS[7]))
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


@pytest.mark.usefixtures("cpu")
def test_a_row_that_takes_too_long_counts_as_far_as_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock of which every look takes a second."""
    clock = SimpleNamespace(monotonic=count().__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(gpu_row, "time", clock)
    job = JOBS[1].small()
    row = gpu_row.measure(job, "cpu", seconds=60)
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
def test_a_row_that_fails_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Behind the others, once; and by the next call, which finds what was right in its place."""
    path, tried = tmp_path / "gpu.json", []

    def fail(job: Job, *_: object) -> dict[str, Any]:
        tried.append(job.policy)
        if job.policy == KARA_SMALL or (job.policy == NONE and len(tried) == 1):
            raise RuntimeError("an illegal memory access was encountered")
        return {"output_tok_s": 10.0, "requests": 1}

    monkeypatch.setattr(gpu, "JOBS", JOBS[:3])
    monkeypatch.setattr(gpu_row, "measure", fail)
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--save-result", str(path)])
    assert gpu.main() == 1
    snap = JOBS[2].small().policy
    assert tried == [NONE, KARA_SMALL, snap, NONE, KARA_SMALL]
    assert "all 3 rows are done, 1 of them failed" in capsys.readouterr().out
    rows = {row["policy"]: row for row in json.loads(path.read_text())["rows"].values()}
    assert "illegal memory access" in rows[KARA_SMALL]["error"] and "error" not in rows[NONE]
    monkeypatch.setattr(gpu_row, "measure", lambda *_: {"output_tok_s": 20.0, "requests": 1})
    assert gpu.main() == 0
    rows = {row["policy"]: row for row in json.loads(path.read_text())["rows"].values()}
    assert rows[KARA_SMALL]["ratio_to_none"] == 2.0 and "error" not in rows[KARA_SMALL]


def test_weights_that_a_step_does_not_read_do_not_count() -> None:
    row = JOBS[1].small()
    model = gpu_row.build(row, "cpu").core.runner.model
    every = sum(p.numel() * p.itemsize for p in model.parameters())
    assert every - gpu_row.step_bytes(model) == 128 * 64 * 4, "128 words of 64 numbers"


@pytest.mark.parametrize(
    ("wrong", "commit", "asked", "status"),
    [
        ([], "abc", [], 0),
        (["kernels-smoke-model"], "abc", [], 0),
        (["tokens"], "abc", [], 1),
        ([], "xyz", [["tokens"]], 0),  # a check of another commit
        (["tokens"], "xyz", [["tokens"]], 1),
    ],
)
def test_only_wrong_tokens_end_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: list[str],
    commit: str,
    asked: list[list[str]],
    status: int,
) -> None:
    """What else is wrong stands beside the figures, and nothing is checked twice."""
    path, checked = tmp_path / "gpu.json", tmp_path / "checked.json"
    made: list[list[str]] = []

    def write(file: Path, commit: str) -> None:
        parts = {name: {"right": name not in wrong} for name in gpu.FIRST}
        file.write_text(json.dumps({"machine": {"commit": commit}, "parts": parts}))

    def check(parts: list[str], file: Path, seconds: float) -> bool:
        made.append(parts)
        write(file, "abc")
        return not wrong

    write(checked, commit)
    monkeypatch.setattr(gpu, "check", check)
    monkeypatch.setattr(gpu, "machine", lambda: {"commit": "abc"})
    monkeypatch.setattr(gpu, "JOBS", JOBS[:1])
    row = Ended(1.0, {"output_tok_s": 10.0}, None)
    monkeypatch.setattr(gpu, "run_apart", lambda *_: row)
    options = ["gpu", "--smoke", "--save-result", str(path), "--checked", str(checked)]
    monkeypatch.setattr(sys, "argv", options)
    assert gpu.main() == status and made == asked
    found = json.loads(path.read_text())
    assert found["wrong"] == wrong and len(found["rows"]) == 1 - status
    if not status:
        assert all(name in path.with_suffix(".md").read_text() for name in wrong)


@pytest.mark.usefixtures("cpu")
def test_an_engine_that_survives_a_failed_step_has_no_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, calls = Transformer.forward, count()

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == 20:
            raise RuntimeError("an illegal memory access was encountered")
        return forward(*args, **options)

    monkeypatch.setattr(Transformer, "forward", fail)
    job = replace(JOBS[0].small(), eager=True)
    row = gpu_row.measure(job, "cpu", seconds=60)
    assert "an illegal memory access" in row["error"] and "Traceback" in row["error"]


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


@pytest.mark.usefixtures("cpu")
def test_without_a_gpu_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
