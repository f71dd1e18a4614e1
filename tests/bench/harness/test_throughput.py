"""`kvserve bench throughput`: what is counted, what is shown, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness.commands.throughput import Throughput
from bench.harness.datasets.workload import random_prompts
from bench.harness.measuring.measure import Figures, play
from bench.harness.setup.policy_spec import policy_spec
from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats
from tests.bench.harness.conftest import Bench

SPECULATION = (
    *("--compare-speculation", "--speculative-config"),
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}',
)
KARA = "kara:window=32,buffer=4,ratio=0.2,period=4,chunk_budget=2,max_chunk=4"
SMALL = (
    *("--num-prompts", "16", "--input-len", "16", "--output-len", "128", "--block-size", "4"),
    *("--max-num-seqs", "16", "--max-model-len", "256"),
)
ROW_KEYS = {
    *("policy", "policy_args", "output_tokens", "wall_s", "output_tok_s", "ratio_to_first"),
    *("mean_running", "peak_running", "held_over_logical", "blocks_released", "compactions"),
    *("preemptions", "evicted_tokens", "steps", "itl_p50_ms", "itl_p99_ms", "input_tokens"),
    *("mean_step_output_tok_s", "output_tok_s_all", "mean_pool_usage", "blocks_total"),
}


def test_a_grid_of_pools_and_limits(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compression runs more sequences on a small pool; each row is compared within its cell."""
    folder = tmp_path / "plots"
    grid = ("--pool-shares", "1.5", "0.25", "--max-num-seqs", "16", "3", "--num-warmups", "0")
    policies = ("--policy", "none", "--policy", KARA, "--save-plots", str(folder))
    status, saved = bench("bench throughput", *SMALL, *grid, *policies)
    assert status == 0 and saved["complete"] and len(saved["rows"]) == 8
    assert {"benchmark", "date", "device", "threads", "commit", "versions", "command"} <= {*saved}
    assert {*saved["device"]} == {"type", "name"}
    assert all(row.keys() >= ROW_KEYS for row in saved["rows"])
    cells = {(r["max_num_seqs"], r["pool_blocks"], r["policy"]): r for r in saved["rows"]}
    demand = 16 * 36  # 16 + 128 - 1 cached tokens in blocks of 4
    assert saved["settings"]["demand_blocks"] == demand
    none, kara = cells[16, demand / 4, "none"], cells[16, demand / 4, KARA]
    ample, few = cells[16, 864, KARA], cells[3, 864, KARA]
    assert none["blocks_total"] == kara["blocks_total"] == demand / 4
    assert none["output_tokens"] == kara["output_tokens"] == 16 * 128
    assert none["compactions"] == 0 and none["held_over_logical"] == 1.0
    assert kara["compactions"] >= 16 and kara["blocks_released"] > 0 and kara["event_ms"] > 0
    assert kara["evicted_tokens"] > 0 and kara["held_over_logical"] < 0.9
    assert kara["mean_running"] > none["mean_running"] and kara["steps"] < none["steps"]
    assert kara["pool_share"] == 0.25
    assert kara["preemptions"] + kara["early_compactions"] > 0 == ample["preemptions"]
    assert ample["peak_running"] == 16 and few["peak_running"] == 3
    for (limit, blocks, _), row in cells.items():
        first = cells[limit, blocks, "none"]
        assert row["ratio_to_first"] == row["output_tok_s"] / first["output_tok_s"]
    shown = capsys.readouterr().out
    assert "pool of 144 blocks, 0.25 of the demand" in shown
    line = next(line for line in shown.splitlines() if KARA in line)
    assert f" {cells[3, 144, KARA]['compactions']} " in line
    assert f"{KARA}: times the first row of its cell: on a pool of 0.25: " in shown
    assert [path.name for path in folder.iterdir()] == ["throughput.png"]


def test_repeats_take_turns_and_show_the_median_until_ctrl_c(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = iter((10.0, 5.0, 30.0, 6.0, 20.0, 7.0))
    order, stop_at = [], 6

    def fake_run(self: object, spec: Any, title: str, **settings: Any) -> Figures:
        order.append(title)
        if len(order) > stop_at:
            raise KeyboardInterrupt
        return {"output_tok_s": next(rates), "compactions": 1, "cut_short": 0}

    monkeypatch.setattr(Throughput, "run_once", fake_run)
    policies = ("--policy", "none", "--policy", "kara:window=64")
    status, saved = bench("bench throughput", *SMALL, "--repeat", "3", *policies)
    assert status == 0
    assert order == [
        f"{name} {turn}/3" for turn in (1, 2, 3) for name in ("none", "kara:window=64")
    ]
    none, kara = saved["rows"]
    assert none["output_tok_s_all"] == [10.0, 30.0, 20.0] and none["output_tok_s"] == 20.0
    assert kara["output_tok_s"] == 6.0
    assert kara["ratio_to_first_all"] == [5 / 10, 6 / 30, 7 / 20]
    assert kara["ratio_to_first"] == 7 / 20
    assert "0.35 of the first row; it did not pay here" in capsys.readouterr().out
    rates, order, stop_at = iter((10.0,)), [], 1
    status, saved = bench("bench throughput", *SMALL, "--repeat", "3", *policies)
    assert status == 130
    assert not saved["complete"] and [row["policy"] for row in saved["rows"]] == ["none"]
    assert "cut short" in capsys.readouterr().out


def test_shared_prefixes_with_caching_off_and_on(bench: Bench) -> None:
    lengths = {"prefix-len": 32, "suffix-len": 8, "num-prefixes": 2, "output-len": 4}
    flags = [f"--prefix-repetition-{name}={value}" for name, value in lengths.items()]
    flags += ["--dataset-name", "prefix_repetition", "--num-prompts", "12", "--block-size", "4"]
    policies = ("--policy", "none", "--policy", "streaming_llm:budget=20")
    status, saved = bench("bench throughput", *flags, *policies, "--compare-prefix-caching")
    assert status == 0
    rows = {(row["policy_args"]["name"], row["prefix_caching"]): row for row in saved["rows"]}
    assert list(rows) == [
        (name, side) for name in ("none", "streaming_llm") for side in ("off", "on")
    ]
    for name in ("none", "streaming_llm"):
        off, on = rows[name, "off"], rows[name, "on"]
        assert off["prompt_cached"] == 0.0
        # All but the first of each prefix find its 32 of 40 tokens.
        assert on["prompt_cached"] == pytest.approx(10 * 32 / (12 * 40))
        assert off["output_tokens"] == on["output_tokens"] == 48
        assert off["input_tokens"] == on["input_tokens"] == 480
    assert saved["settings"]["prefix_repetition_num_prefixes"] == 2


def test_speculation_off_and_on(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "3", "--output-len", "60", "--policy", "none", *SPECULATION)
    status, saved = bench("bench throughput", *flags)
    off, on = saved["rows"]
    assert status == 0 and (off["speculation"], on["speculation"]) == ("off", "on")
    assert off["accepted_tokens"] == 0 < on["accepted_tokens"] and on["steps"] < off["steps"]
    assert on["accepted_share"] == on["accepted_tokens"] / on["draft_tokens"]
    assert off["output_tokens"] == on["output_tokens"] == 180
    assert "of these right" in capsys.readouterr().out
    assert saved["settings"]["speculative_config"]["method"] == "ngram"


def test_rows_of_several_types_are_called_by_their_policy(bench: Bench) -> None:
    flags = (*SMALL, "--pool-share", "1", "--policy", "none@int8", "--policy", "none")
    status, saved = bench("bench throughput", *flags)
    found = [(row["policy"], row["kv_cache_dtype"]) for row in saved["rows"]]
    assert status == 0 and found == [("none", "int8"), ("none", "auto")]


@pytest.mark.parametrize(
    "text", ["kara:window=128,ratio=0.3@k8v4", '{"name":"kara","window":128,"ratio":0.3}']
)
def test_policy_specs_are_read(text: str) -> None:
    spec = policy_spec(text)
    assert spec.as_dict == {"name": "kara", "window": 128, "ratio": 0.3}
    assert spec.kv_cache_dtype == ("k8v4" if "@" in text else None)
    assert spec.label == "kara:window=128,ratio=0.3" + ("@k8v4" if "@" in text else "")
    yes = policy_spec("rkv:protect_prompt=true,budget=64")
    assert policy_spec(yes.label) == yes and yes.fields["protect_prompt"] is True


class ScriptedEngine:
    """Two requests; the second one waits until the first has ended."""

    script = ((["0.0"], 1), (["0.0"], 1), (["0.0"], 0), (["1.0"], 1), (["1.0"], 0))

    def __init__(self) -> None:
        self.outputs: dict[str, RequestOutput] = {}
        self.steps = 0
        self.now = 0.0

    @property
    def has_unfinished_requests(self) -> bool:
        return self.steps < len(self.script)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        assert params.greedy and params.ignore_eos
        self.outputs[request_id] = RequestOutput(request_id, None, prompt, [CompletionOutput(0)])

    def step(self) -> list[RequestOutput]:
        changed = [self.outputs[request_id] for request_id in self.script[self.steps][0]]
        for output in changed:
            choice = output.outputs[0]
            choice.token_ids.append(7)
            output.finished = len(choice.token_ids) == (3 if output.request_id == "0.0" else 2)
            output.num_cached_tokens = 2
            output.kv_cache_details = KVCacheDetails("kara", 8, held_tokens=6, held_entries=24)
            choice.finish_reason = "length" if output.finished else None
        self.steps += 1
        self.now += 10.0
        return changed

    def stats(self) -> EngineStats:
        self.now += 1.0
        running = self.script[self.steps - 1][1] if self.steps else 0
        return EngineStats(
            num_running=running,
            blocks_total=10,
            blocks_free=10 - 5 * running,
            tokens_logical=10 * running,
            tokens_held=4 * running,
            compactions_total=100 + self.steps,
        )


def test_figures_are_those_of_the_steps() -> None:
    engine = ScriptedEngine()
    prompts = random_prompts([(4, 3)] * 2, 50, seed=0)
    figures = play(engine, prompts, clock=lambda: engine.now).figures
    # A device whose steps overlap works on while the engine is watched.
    assert figures["wall_s"] == 54.0, "five steps, and four looks between them"
    assert figures["itl_p50_ms"] == 11_000.0
    assert figures["output_tokens"] == 5 and figures["input_tokens"] == 8
    assert figures["steps"] == 5 and figures["compactions"] == 5
    # A sequence that ended in a step ran in it.
    assert figures["mean_running"] == 1.0 and figures["peak_running"] == 1
    assert figures["held_over_logical"] == pytest.approx(0.4)
    assert figures["mean_pool_usage"] == pytest.approx(0.3)
    assert figures["output_tok_s"] == pytest.approx(5 / figures["wall_s"])
    assert figures["finish_reasons"] == {"length": 2}
    assert figures["prompt_cached"] == 0.5
    assert figures["held_over_logical_at_end"] == 0.75 and figures["held_entries_at_end"] == 24
    assert figures["running_over_steps"] == [1.0] * 5
    assert figures["cut_short"] == 1  # the second has two tokens of three
