"""`make gpu-check`: what it calls right, what it survives, and its parts where there is a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_check
from bench.gpu_runs import parts as gpu_parts
from bench.gpu_runs.parts import PARTS, Findings
from bench.machine import Ended, run_apart

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
