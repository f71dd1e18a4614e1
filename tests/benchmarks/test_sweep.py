"""`kvserve bench sweep`: the grid, ratios to `none` of the same turn, and the crossover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.measuring.measure import Figures
from kvserve.benchmarks.measuring.traffic import Traffic
from kvserve.benchmarks.reports.crossover import Point, crossovers, length_verdict, verdict
from kvserve.server.cli.commands import run
from tests.benchmarks.conftest import Bench

SMALL = ("--num-prompts", "10", "--input-len", "16", "--output-len", "48", "--block-size", "4")
KARA = "kara:window=32,buffer=4,period=4,chunk_budget=2"
DEMAND = 10 * 16  # 63 cached tokens in blocks of 4


def points(**ratios: float) -> list[Point]:
    return [Point(int(blocks[1:]), [ratio]) for blocks, ratio in ratios.items()]


def test_the_crossover_lies_between_its_neighbours() -> None:
    found = points(b100=1.3, b200=1.1, b400=0.9)
    assert crossovers(found) == [pytest.approx(300)]
    assert crossovers(found[::-1]) == [pytest.approx(300)]
    said = verdict("kara", found, demand=400)
    assert said == (
        "kara: beats none below a pool of about 300 blocks (0.75 of the demand): faster than none "
        "at 0.25 (1.30x), 0.50 (1.10x), loses at 1.00 (0.90x)."
    )


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"b100": 1.3, "b200": 1.01}, "p: faster than none on every pool measured: 0.50 (1.30x)"),
        ({"b100": 0.9, "b200": 1.0}, "p: loses to none on every pool measured: 0.50 (0.90x), 1.00"),
        ({"b100": 0.9, "b200": 1.2}, "p: beats none above a pool of about 133 blocks (0.67"),
        ({"b50": 1.1, "b100": 0.9, "b200": 1.1}, "passes 1 more than once"),
    ],
)
def test_other_shapes_are_said_too(ratios: dict[str, float], said: str) -> None:
    assert said in verdict("p", points(**ratios), demand=200)


def test_a_length_from_which_on_a_policy_pays() -> None:
    said = length_verdict("kara", [Point(500, [0.9]), Point(1500, [1.1]), Point(3000, [2.0])])
    assert said == (
        "kara: beats none above answers of about 1,000 tokens: faster than none at 1,500 (1.10x), "
        "3,000 (2.00x), loses at 500 (0.90x)."
    )


def test_runs_that_disagree_are_named() -> None:
    found = [Point(100, [1.3, 1.2, 1.4]), Point(200, [0.9, 1.1, 0.95])]
    assert verdict("p", found, demand=200).endswith("; runs disagree at 1.00.")
    assert "disagree" not in verdict("p", found[:1], demand=200)


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int, int]]]:
    """Stand in for the runs; returns the list that they are noted in."""

    def patch(rate: Callable[[str, int, int], float]) -> list[tuple[str, int, int]]:
        noted: list[tuple[str, int, int]] = []

        def fake(
            self: object, spec: Any, title: str, *, pool: Any, max_num_seqs: int, show: bool
        ) -> Figures:
            noted.append((spec.label, pool.blocks, max_num_seqs))
            reached = rate(spec.name, pool.blocks, len(noted))
            return {"output_tok_s": reached, "running_over_steps": [1.0, 2.0], "steps": 4}

        monkeypatch.setattr(Traffic, "run", fake)
        return noted

    return patch


def test_ratios_are_between_runs_of_one_turn(
    bench: Bench, rates: Callable[..., list[tuple[str, int, int]]]
) -> None:
    """The machine gets faster from run to run; ratios are those of neighbours nevertheless."""
    noted = rates(
        lambda name, blocks, i: (1.0 + (i - 1) // 4) * (90 / blocks if name == "kara" else 1)
    )
    grid = ("--pool-blocks", "100", "60", "--repeat", "3", "--retention", "0.3")
    policies = ("--policy", "none", "--policy", KARA)
    status, saved = bench("bench sweep", *SMALL, *grid, *policies)
    assert status == 0
    kara = f"{KARA},ratio=0.3"
    turn = [("none", 60, 256), (kara, 60, 256), ("none", 100, 256), (kara, 100, 256)]
    assert noted == turn * 3
    ratios = {(row["policy"], row["pool_blocks"]): row["ratio_to_none"] for row in saved["rows"]}
    assert ratios[kara, 60] == pytest.approx(1.5) and ratios[kara, 100] == pytest.approx(0.9)
    (crossing,) = saved["crossovers"]
    assert crossing["blocks"] == [pytest.approx(60 + 40 * 5 / 6)]
    assert crossing["shares"] == [pytest.approx(crossing["blocks"][0] / DEMAND)]
    assert [row["pool_share"] for row in saved["rows"][::2]] == [60 / DEMAND, 100 / DEMAND]


@pytest.mark.slow
def test_a_sweep_runs_the_grid_and_draws_it(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plots"
    grid = ("--pool-shares", "0.25", "1.5", "--max-num-seqs", "10", "3")
    flags = (*SMALL, *grid, "--num-warmups", "0", "--policy", KARA, "--save-plots", str(folder))
    status, saved = bench("bench sweep", *flags)
    assert status == 0 and saved["complete"]
    cells = {(r["max_num_seqs"], r["pool_blocks"], r["policy"]): r for r in saved["rows"]}
    assert len(cells) == 8
    small, ample, few = cells[10, 40, KARA], cells[10, 240, KARA], cells[3, 240, KARA]
    assert small["compactions"] > 0 and small["held_over_logical_at_end"] < 1
    assert small["preemptions"] + small["early_compactions"] > 0 == ample["preemptions"]
    assert ample["peak_running"] == 10 and few["peak_running"] == 3
    assert cells[10, 40, "none"]["ratio_to_none"] == 1.0
    for row in cells.values():
        left = (row["compactions"] > 0) * 4 * (2 * 8 * 4 + 4)  # remainders, in 4 lanes
        assert row["held_bytes_at_end"] == row["held_entries_at_end"] * 2 * 8 * 4 + left
    shown = capsys.readouterr().out
    assert [f"{KARA}, at most {n} running: " in shown for n in (3, 10)] == [True, True]
    drawn = sorted(path.name for path in folder.iterdir())
    assert drawn == ["running.png", "throughput.png"]  # random prompts are not graded
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_graded_sweep_draws_accuracy_against_bytes(bench: Bench, tmp_path: Path) -> None:
    flags = ("--dataset", "recall", "--num-prompts", "2", "--pool-shares", "1", "--policy", KARA)
    status, saved = bench("bench sweep", *flags, "--save-plots", str(tmp_path / "plots"))
    assert status == 0 and saved["rows"][0]["interval_95"][0] == 0.0
    assert (tmp_path / "plots" / "accuracy.png").stat().st_size > 1000


def test_ctrl_c_keeps_what_was_measured(
    bench: Bench, rates: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def until_the_fourth(name: str, blocks: int, i: int) -> float:
        if i == 4:
            raise KeyboardInterrupt
        return 1.2 if name == "kara" else 1.0

    rates(until_the_fourth)
    grid = ("--pool-shares", "0.5", "1", "--policy", KARA)
    status, saved = bench("bench sweep", *SMALL, *grid)
    assert status == 130 and not saved["complete"]
    assert [(row["policy"], row["pool_share"]) for row in saved["rows"]] == [
        ("none", 0.5), (KARA, 0.5), ("none", 1.0)
    ]  # fmt: skip
    assert saved["crossovers"][0]["blocks"] == []
    assert "cut short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pool-shares", "0"], "--pool-shares"),
        (["--pool-blocks", "1"], "--pool-blocks"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--retention", "0.2", "--policy", "kara:ratio=0.3"], "--retention"),
        (["--policy", "streaming_llm"], "budget"),
        (["--compare-transformers"], "--compare-transformers"),
    ],
)
def test_mistakes_are_named_in_one_line(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "sweep", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvserve bench sweep: error: ") and error.count("\n") == 1
    assert named in error


def test_lengths_are_swept_like_pools(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int, int]] = []

    def fake(self: Traffic, spec: Any, title: str, *, pool: Any, **_: Any) -> Figures:
        longest = max(self.workload.full_lengths())
        asked.append((spec.name, longest, pool.blocks))
        return {"output_tok_s": longest / 40 if spec.name == "kara" else 1.0}

    monkeypatch.setattr(Traffic, "run", fake)
    flags = ("--num-prompts", "10", "--input-len", "17", "--block-size", "4", "--policy", KARA)
    grid = ("--output-lens", "64", "16", "--pool-shares", "0.5", "--save-plots", str(tmp_path))
    status, saved = bench("bench sweep", *flags, *grid)
    assert status == 0
    assert asked == [
        *(("none", 32, 40), ("kara", 32, 40)),
        *(("none", 80, 100), ("kara", 80, 100)),  # half of each length's own demand
    ]
    assert [row["output_len"] for row in saved["rows"]] == [16, 16, 64, 64]
    (crossing,) = saved["crossovers"]
    assert crossing["tokens"] == [pytest.approx(16 + 48 * 0.2 / 1.2)]
    assert crossing["pool_share"] == 0.5
    assert [path.name for path in tmp_path.glob("*.png")] == ["lengths.png"]
    refused, _ = bench("bench sweep", *SMALL, "--output-lens", "16", "--policy", KARA)
    assert refused == 2  # --output-len is in SMALL
