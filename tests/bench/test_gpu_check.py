"""`make gpu-check`: what it calls right, what it survives, and its parts where there is a GPU."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_check
from bench.gpu_runs import parts as gpu_parts
from bench.gpu_runs.parts import PARTS, Findings
from bench.machine import Ended, run_apart, write_json
from kvserve.engine.models.transformer import Transformer
from tests.waiting import WAIT, alive, wait_until

RIGHT = Ended(1.0, {"rows": [{"case": "a", "right": True}], "left_out": []}, None)
WRONG = Ended(1.0, {"rows": [{"case": "a", "right": False}], "left_out": []}, None)
LEFT_OUT = Ended(1.0, {"rows": [], "left_out": ["needs a GPU"]}, None)
EMPTY = Ended(1.0, {}, None)
CUT = Ended(9.0, RIGHT.found, "took longer than 9 s: ...")


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ((RIGHT, RIGHT), 0),
        ((RIGHT, LEFT_OUT), 0),
        ((RIGHT, WRONG), 1),
        ((WRONG, RIGHT), 1),
        ((RIGHT, CUT), 1),
        ((RIGHT, EMPTY), 1),
    ],
    ids=["right", "left-out", "wrong", "wrong-first", "cut", "empty"],
)
def test_only_what_was_shown_is_right(
    ends: tuple[Ended, Ended], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts behind one that failed still run, and each is on paper when the next begins."""
    path, waiting = tmp_path / "out" / "check.json", list(ends)

    def run(arguments: list[str], result: Path, limit: float) -> Ended:
        if arguments[2] == "graphs":  # which runs alone
            assert list(json.loads(path.read_text())["parts"]) == ["tokens"]
        assert (
            arguments[:2] == ["-m", "bench.gpu_runs.parts"] and limit <= PARTS[arguments[2]].limit
        )
        return waiting.pop(0)

    monkeypatch.setattr(gpu_check, "run_apart", run)
    monkeypatch.setattr(gpu_check, "machine", lambda: {"device": "none", "commit": "abc"})
    options = ["--part", "tokens", "graphs", "--save-result", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *options])
    assert gpu_check.main() == status and not waiting
    table = path.with_suffix(".md").read_text()
    assert ("**WRONG**" in table) == bool(status) and "commit abc" in table
    assert ("took longer" in table) == (CUT in ends)


def test_a_part_that_no_time_is_left_for_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "run_apart", None)
    assert not gpu_check.check(["tokens"], tmp_path / "check.json", seconds=0.0)


def test_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors, its time and its children end with it; what it has written stays."""
    result = tmp_path / "part.json"
    write = f"import pathlib, sys, time; pathlib.Path({str(result)!r}).write_text('[1]'); "
    assert run_apart(["-c", write], result, WAIT).found == [1]
    failed = run_apart(["-c", write + "raise ValueError('an illegal access')"], result, WAIT)
    assert failed.found == [1] and failed.error is not None
    assert "ended with status 1" in failed.error and "an illegal access" in failed.error
    begun = tmp_path / "child"
    child = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {begun}; sleep 3600'])"

    class Cut(subprocess.Popen[Any]):
        """Its time is over once it has written and its child runs."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            wait_until(lambda: begun.exists() and begun.read_text().endswith("\n"))
            raise subprocess.TimeoutExpired(self.args, timeout)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", Cut)
        cut = run_apart(["-c", write + child], result, 3.0)
    assert cut.error is not None and "took longer than 3 s" in cut.error and cut.found == [1]
    wait_until(lambda: not alive(int(begun.read_text())))
    assert run_apart(["-c", "pass"], result, WAIT).found == {}, "of another run"


def test_results_are_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.json"
    write_json(path, {"rows": 1})
    with pytest.raises(TypeError):
        write_json(path, {"rows": object()})
    assert json.loads(path.read_text()) == {"rows": 1}


def test_a_case_that_fails_leaves_the_others(tmp_path: Path) -> None:
    found = Findings(tmp_path / "part.json")
    with found.case("first"):
        raise RuntimeError("no kernel image")
    with found.case("second"):
        found.add("second", True)
    first, second = json.loads((tmp_path / "part.json").read_text())["rows"]
    assert not first["right"] and "no kernel image" in first["found"] and second["right"]


def test_parts_tell_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens than transformers', replays that change tokens, logits that are off."""

    def rows(name: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{name}.json"
        PARTS[name].run(Findings(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
        return found

    monkeypatch.setattr(gpu_parts, "write_model", lambda folder, *_: folder)
    monkeypatch.setattr(gpu_parts, "small_engine", lambda *_, **settings: FakeEngine(settings))
    monkeypatch.setattr(gpu_parts, "reference_tokens", lambda *_: [[1], [2], [3], [4]])
    for answers, right in (([[1], [2], [3], [4]], True), ([[1], [2], [3], [5]], False)):
        monkeypatch.setattr(gpu_parts, "generate", lambda *_, answers=answers: answers)
        assert [row["right"] for row in rows("tokens")][:2] == [right] * 2
    answer = iter(range(100))
    monkeypatch.setattr(gpu_parts, "generate", lambda *_: [[next(answer)]])
    on_a_cpu = [row["right"] for row in rows("tokens") if "on a CPU" in row["case"]]
    assert on_a_cpu == [False] * len(gpu_parts.EXACT)
    graphs = rows("graphs")
    assert {row["case"]: row["right"] for row in graphs if "none" in row["case"]} == {
        **{"none, plain": True, "none, graphs": False},
        **{"none, overlap": False, "none, both": False},
    }
    expected = torch.randn(3, 5)
    theirs = {torch.float32: expected, torch.bfloat16: expected * 1.01}
    monkeypatch.setattr(gpu_parts, "reference_logits", lambda *given: theirs[given[-1]])
    for factor, right in ((1.012, True), (1.014, False)):
        logits = expected * factor
        monkeypatch.setattr(gpu_parts, "engine_logits", lambda *_, logits=logits: logits)
        assert [row["right"] for row in rows("logits")] == [right] * 2


def test_a_step_that_failed_is_found_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine survives it; its tokens are nobody's measure."""
    forward, calls = Transformer.forward, itertools.count()

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls) == 20:
            raise ValueError("no such kernel")
        return forward(*args, **options)

    monkeypatch.setattr(Transformer, "forward", fail)
    monkeypatch.setattr(gpu_parts, "EXACT", {"none": gpu_parts.POLICIES["none"]})
    path = tmp_path / "graphs.json"
    PARTS["graphs"].run(Findings(path))
    plain, *others = json.loads(path.read_text())["rows"]
    assert not plain["right"] and "no such kernel" in plain["found"]
    assert "_launch" in plain["found"] and all(row["right"] for row in others)


class FakeEngine:
    """Compacts where it should, and replays where it was told to."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.core = self.runner = self
        self.graphs = self if "cudagraph_capture_sizes" in settings else None
        self.replays, self.compactions_total = 7, 0

    def stats(self) -> FakeEngine:
        return self


@pytest.mark.slow
def test_a_cpu_shows_what_it_can(tmp_path: Path) -> None:
    """Whole, in processes, with nothing to say against it."""
    path = tmp_path / "check.json"
    assert gpu_check.check(list(PARTS), path, seconds=900.0)
    parts = json.loads(path.read_text())["parts"]
    of_a_gpu = {"waits", "bandwidth", "choices"}
    assert all(part["rows"] for name, part in parts.items() if name not in of_a_gpu)
    if not torch.cuda.is_available():
        assert all(parts[name]["left_out"] for name in of_a_gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(PARTS))
def test_parts_on_a_gpu(name: str, tmp_path: Path) -> None:
    result = tmp_path / "part.json"
    ended = run_apart(["-m", "bench.gpu_runs.parts", name, str(result)], result, PARTS[name].limit)
    entry = gpu_check.verdict(PARTS[name], ended)
    assert entry["right"] and not entry["left_out"], entry
