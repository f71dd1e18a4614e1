"""A measurement in pieces: what an earlier call made is taken, the rest is made or left."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.measuring import pieces as module
from kvserve.benchmarks.measuring.pieces import Pieces
from kvserve.benchmarks.measuring.runs import Contestant, run_in_turns
from kvserve.log import ConfigError


class Clock:
    """Seconds that pass only when a run is made."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr("kvserve.benchmarks.measuring.runs.time", clock)
    monkeypatch.setattr(module, "commit", lambda: "abc")
    monkeypatch.setattr("sys.argv", ["kvserve", "bench", "--minutes", "1", "--seed", "0"])
    return clock


def pieces(folder: Path, minutes: float | None = 1.0) -> Pieces:
    def fail(words: str) -> None:
        raise ConfigError(words)

    return Pieces(argparse.Namespace(minutes=minutes, save_result=folder / "r.json", fail=fail))


def contestants(clock: Clock, made: list[str], seconds: float = 25.0) -> list[Contestant]:
    def run(title: str) -> dict[str, Any]:
        clock.now += seconds
        made.append(title)
        return {"output_tok_s": float(len(made))}

    return [Contestant(name, None, run) for name in ("none", "kara")]


def test_a_later_call_goes_on_where_one_stopped(tmp_path: Path, clock: Clock) -> None:
    made: list[str] = []
    first = pieces(tmp_path)
    run_in_turns(contestants(clock, made), 2, first)
    assert made == ["none 1/2", "kara 1/2"] and not first.complete  # a third would end after 75 s
    assert first.notes() == ["some runs are not made yet: run the same command again"]
    second, both = pieces(tmp_path), contestants(clock, made)
    run_in_turns(both, 2, second)
    assert made == ["none 1/2", "kara 1/2", "none 2/2", "kara 2/2"] and second.complete
    assert [each.rates for each in both] == [[1.0, 3.0], [2.0, 4.0]]
    assert second.notes() == [] and list(tmp_path.iterdir()) == [tmp_path / "r.runs.json"]
    first.clear()  # of which some were not made
    assert list(tmp_path.iterdir())
    second.clear()
    assert not list(tmp_path.iterdir())


def test_commits_of_the_pieces_are_named(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_turns(contestants(clock, []), 2, pieces(tmp_path))
    monkeypatch.setattr(module, "commit", lambda: "def")
    later = pieces(tmp_path)
    run_in_turns(contestants(clock, []), 2, later)
    assert later.notes() == ["runs were made at several commits: abc, def"]


def test_runs_of_another_command_are_refused(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_in_turns(contestants(clock, []), 2, pieces(tmp_path))
    monkeypatch.setattr("sys.argv", ["kvserve", "bench", "--minutes=9", "--seed", "0"])
    assert pieces(tmp_path).commits == ["abc"]
    monkeypatch.setattr("sys.argv", ["kvserve", "bench", "--minutes=9", "--seed", "1"])
    with pytest.raises(ConfigError, match="runs of another command"):
        pieces(tmp_path)


def test_without_a_limit_nothing_is_kept(tmp_path: Path, clock: Clock) -> None:
    made: list[str] = []
    free = pieces(tmp_path, None)
    run_in_turns(contestants(clock, made, 900.0), 3, free)
    assert len(made) == 6 and free.complete and not list(tmp_path.iterdir())
