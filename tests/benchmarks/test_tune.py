"""`kvserve tune`: what it finds and says, what it refuses; and the break-even formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve.benchmarks.commands.tune import event_queries, notes
from kvserve.benchmarks.simulator.break_even import break_even, event_s_per_token, mean_held
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel, Queries
from kvserve.engine.models.spec import parse_spec
from kvserve.engine.policies.registry import make_policy
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.server.cli import commands as cli

LLAMA = parse_spec(LARGE_SHAPES["llama-3.1-8b"], "llama-3.1-8b")
SMALL = (
    *("tune", "--device", "h100", "--disable-tqdm", "--max-num-seqs", "16", "--num-requests", "24"),
    *("--input-len-mean", "20", "--output-len-mean", "150", "--output-len-cap", "400"),
    *("--buffer", "8", "--window", "32", "64", "--ratio", "0.25", "0.5", "--period", "8"),
)


def tune(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "tune.json"
    status = cli.run([*SMALL, "--save-result", str(file), *flags])
    return status, json.loads(file.read_text()) if file.exists() else {}


def test_a_grid_on_a_small_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = ("--query-source", "log", "recompute")
    plain = "kara:window=64,ratio=0.25,period=8,buffer=8,query_dtype=model"
    snapkv = "snapkv:trigger=threshold,budget=64,threshold=96,window=8"
    extra = ("--policy", snapkv, "--policy", plain)
    pool = ("--shape", "llama-3.1-8b", "--kv-cache-tokens", "800", "--event-overhead-ms", "0.1")
    status, saved = tune(tmp_path, *pool, *sources, *extra)
    rows = saved["rows"]
    assert status == 0 and saved["complete"] and saved["device"]["type"] == "simulated"
    assert saved["settings"]["pool_tokens"] == 800
    assert [row["output_tok_s"] for row in rows] == sorted(
        (row["output_tok_s"] for row in rows), reverse=True
    )
    by_name = {row["policy"]: row for row in rows}
    assert len(by_name) == len(rows) == 1 + 2 * 2 * 2 + 2
    assert len({row["output_tokens"] for row in rows}) == 1
    none = by_name["none"]
    assert none["ratio_to_none"] == 1.0 and none["compactions"] == 0 and none["preemptions"] > 0
    name = "kara:window={},ratio={},period=8,query_source={},buffer=8"
    small, large = (by_name[name.format(32, ratio, "log")] for ratio in (0.25, 0.5))
    assert small["held_over_logical"] < large["held_over_logical"] < 1
    assert small["ratio_to_none"] == small["output_tok_s"] / none["output_tok_s"] > 1.03
    assert by_name[name.format(32, 0.25, "recompute")]["event_share"] > small["event_share"]
    fp8 = by_name[name.format(64, 0.25, "log")]  # which an H100 has
    blocks = [row["mean_pool_usage"] / row["mean_running"] for row in (fp8, by_name[plain])]
    assert blocks[0] < blocks[1]
    shown = capsys.readouterr().out
    assert "SIMULATED, not measured" in shown and "Accuracy is not modelled" in shown
    assert "h100 (2.8 TB/s, 600 TFLOP/s) (simulated)" in shown
    lines = shown.splitlines()
    ratios = [line.split(":")[0] for line in lines if line.startswith("ratio ")]
    assert ratios == ["ratio 0.5", "ratio 0.25"]
    best = next(row for row in rows if row["policy_args"].get("ratio") == 0.25)
    (advice,) = (line for line in lines if line.startswith("ratio 0.25: "))
    assert best["policy"] in advice and "memory-bound" in advice and " saved per step > " in advice
    assert "kvserve eval" in shown and "does not pay" not in shown


def test_it_says_where_compression_does_not_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--shape", "qwen3-4b", "--query-source", "recompute", "--event-overhead-ms", "5")
    status, saved = tune(tmp_path, *flags)
    shown = capsys.readouterr().out
    assert status == 0 and all(row["ratio_to_none"] <= 1 for row in saved["rows"])
    assert saved["settings"]["pool_tokens"] == int(
        (0.9 * 80 * 2**30 - 2 * 4_022_272_000) // (144 * 1024)
    )
    assert (
        "does not pay; break-even (not memory-bound)" in shown and "ms saved per step <=" in shown
    )
    assert "Compression does not pay here: take --policy none." in shown


def test_lengths_from_a_file_and_a_model_from_a_directory(tmp_path: Path, model_dir: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 9, "output": 100}\n{"prompt": 5, "output": 60, "id": 3}\n')
    flags = ("--model", str(model_dir), "--lengths", str(file), "--window", "32", "--ratio", "0.5")
    status, saved = tune(tmp_path, *flags)
    assert status == 0 and saved["rows"][0]["output_tokens"] == 160
    assert saved["settings"]["lengths"] == str(file)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "one of the arguments --model --shape is required"),
        (("--shape", "llama"), "--shape: invalid choice"),
        (("--window", "8"), "--buffer: policy kara: buffer must be an integer below window (8)"),
        (("--ratio", "1.5"), "--ratio: '1.5' is not a number in (0, 1]"),
        (("--bandwidth", "0"), "--bandwidth: must be above 0"),
        (("--len-sigma", "-1"), "--len-sigma: '-1' is not a number >= 0"),
        (("--kv-cache-memory", "2 spoons"), "--kv-cache-memory: '2 spoons' is not"),
        (("--kv-cache-memory", "1MiB"), "--kv-cache-memory: 1,048,576 bytes do not hold two"),
        (("--kv-cache-dtype", "int4"), "--kv-cache-dtype: invalid choice"),
        (("--kv-cache-tokens", "16"), "--kv-cache-tokens: under none a prompt of"),
        (("--max-num-batched-tokens", "4"), "--max-num-batched-tokens must be at least"),
        (("--output-len-mean", "90000", "--output-len-cap", "140000"), "--output-len-cap: 14"),
        (("--lengths", "/no/such.jsonl"), "--lengths: cannot read /no/such.jsonl"),
        (("--policy", "snapkv"), "--policy: policy snapkv: budget must be"),
        (("--policy", "pyramidinfer"), "--policy: pyramidinfer prunes inside a forward"),
        (("--policy", "kara:windw=3"), "--policy: policy kara has no argument 'windw'"),
    ],
)
def test_refusals_name_the_flag(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = () if not flags or flags[0] == "--shape" else ("--shape", "llama-3.1-8b")
    assert cli.run([*SMALL, *shape, *flags]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith("kvserve tune: error: ") and said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("shape", "weights"), [("qwen3-30b-a3b", 56.3), ("gpt-oss-20b", 37.9)])
def test_a_card_that_does_not_hold_the_weights(
    shape: str, weights: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tune", "--shape", shape, "--device", "rtx4090"]) in (1, 2)
    said = capsys.readouterr().err
    assert f"--device: its memory does not hold {weights} GiB of weights" in said


@pytest.mark.parametrize("line", ["", "[1, 2]", '{"prompt": 1}', '{"prompt": 0, "output": 5}', "x"])
def test_a_bad_line_of_lengths_is_named(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 9, "output": 100}\n' + line + "\n")
    assert cli.run([*SMALL, "--shape", "llama-3.1-8b", "--lengths", str(file)]) == 2
    assert f"--lengths: line 2 of {file} is not like" in capsys.readouterr().err


def test_notes_name_requests_that_ended_early() -> None:
    none = {"policy": "none", "policy_args": {"name": "none"}, "cut_short": 2}
    assert any("2 requests ended early" in note for note in notes([none]))
    assert notes([]) == []


def test_notes_name_policies_that_are_simulated_as_even() -> None:
    none = {"policy": "none", "policy_args": {"name": "none"}, "cut_short": 0, "ratio_to_none": 1}
    rows = [none, {**none, "policy": "adakv:budget=64", "lengths": "head"}]
    (said,) = [note for note in notes(rows) if "as if all layers and heads" in note]
    assert said.startswith("adakv:budget=64: ")


# ---- where queries come from --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "queries"),
    [
        ("none", Queries("none")),
        ("kara", Queries("log", 32)),
        ({"name": "kara", "query_reduce": "group_mean"}, Queries("log", 8)),
        ({"name": "kara", "query_reduce": "heads", "query_stride": 8}, Queries("log", 32, 1 / 8)),
        ({"name": "kara", "query_source": "recompute"}, Queries("recompute", 32)),
        ({"name": "kara", "queries": "buffer"}, Queries("log", 32, 32 / 512)),
        ({"name": "kara", "preset": "paper"}, Queries("recompute", 32)),
        ({"name": "snapkv", "budget": 64}, Queries("log", 32)),
        ({"name": "keydiff", "budget": 64}, Queries("none")),
    ],
)
def test_queries_of_a_policy(policy: Any, queries: Queries) -> None:
    assert event_queries(make_policy(policy), LLAMA) == queries


# ---- the break-even formula, by hand ------------------------------------------------------------


def test_break_even_of_a_full_pool() -> None:
    """Llama-8B, pool of 335k tokens, 2,330 entries a sequence, half of them kept: 144 sequences,
    steps of 16.7 ms, 8.4 ms saved; a recompute of every token at 22.7 us costs 3.3 ms."""
    device = replace(DEVICES["h200"], gemm=1e30)  # below the ridge, whatever the batch
    cost, each = CostModel(LLAMA, device), 768 / 736 * 2 * 6.518e9 / 600e12
    full = break_even(cost, 335_000, 10**6, 2330, 1165, each)
    assert full.memory_bound and full.pays
    assert (full.sequences_0, full.sequences_1) == pytest.approx((143.8, 287.6), abs=0.1)
    assert (full.step_0_s, full.saved_s) == pytest.approx((16.7e-3, 8.4e-3), rel=0.01)
    assert full.paid_s == pytest.approx(3.3e-3, rel=0.02)
    # At twice the sequences the events of a step are twice as many: 2 x 16.7 / (16.7 + 6.5).
    assert full.gain == pytest.approx(1.43, abs=0.01)
    eighth = break_even(cost, 335_000, 10**6, 2330, 1165, each / 8)
    assert eighth.gain == pytest.approx(1.90, abs=0.01)
    assert break_even(cost, 335_000, 10**6, 2330, 2300, each).pays is False


@pytest.mark.parametrize(("device", "saved"), [("h200", 690), ("h100", 483), ("a100", 765)])
def test_break_even_with_room_for_everybody(device: str, saved: float) -> None:
    """It pays from so many entries saved per sequence on, whatever the batch."""
    cost = CostModel(LLAMA, DEVICES[device])
    each = 768 / 736 * 2 * cost.recompute_params / cost.device.gemm
    for off, pays in ((0.98, False), (1.02, True)):
        room = break_even(cost, 10**9, 64, 2330, 2330 - off * saved, each)
        assert not room.memory_bound and room.pays is pays
        assert (room.gain > 1) is pays


def test_fixed_costs_of_events_saturate() -> None:
    cost = CostModel(LLAMA, DEVICES["h200"])
    states = [break_even(cost, 10**9, b, 2000, 1000, 0.0, 1 / 736) for b in (1, 10**5)]
    rare, always = (state.paid_s for state in states)
    assert rare == pytest.approx(1.5e-3 / 736, rel=1e-3) and always == pytest.approx(1.5e-3)


def test_mean_held_of_an_average_request() -> None:
    trigger = Periodic(768, 32, 225, 128)
    prompts, outputs = np.array([100]), np.array([3000])
    assert mean_held(prompts, outputs, None, 0.0) == 1600
    # u = 32 + 736 / 2 + 128 / 2 = 464 recent entries, then 225 of 736 of what is older.
    steps = [100 + min(t, 464) + 225 / 736 * max(t - 464, 0) for t in range(3000)]
    assert mean_held(prompts, outputs, trigger, 0.0) == pytest.approx(np.mean(steps), rel=1e-3)
    logged = mean_held(prompts, outputs, trigger, 0.25) - mean_held(prompts, outputs, trigger, 0)
    assert logged == pytest.approx(0.25 * np.mean([min(t, 464) for t in range(3000)]), rel=1e-3)
    short = np.array([300])
    assert mean_held(prompts, short, trigger, 0.0) == mean_held(prompts, short, None, 0.0)
    mixed = mean_held(np.array([100, 0]), np.array([3000, 1000]), None, 0.0)
    assert mixed == (3000 * 1600 + 1000 * 500) / 4000


def test_events_cost_their_share_of_every_token() -> None:
    cost = CostModel(LLAMA, DEVICES["h200"])
    trigger, queries = Periodic(768, 32, 225, 128), Queries("recompute", 32)
    seconds, windows = event_s_per_token(cost, trigger, queries, 1000)
    assert windows == 1 / 736
    assert seconds == cost.observe(768, 768 * 736, 768 * 1384, queries) / 736
