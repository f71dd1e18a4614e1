"""`kvserve eval`: grading, turns, retentions and what is said about the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.commands.evaluate import score
from bench.harness.datasets.task_text import Sample
from bench.harness.datasets.workload import TaskPrompts, task_prompts
from bench.harness.measuring import measure
from bench.harness.measuring.measure import accuracy, play, wilson_interval
from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats
from tests.bench.harness.conftest import Bench

KARA = "kara:window=32,buffer=4,chunk_budget=2,max_chunk=4"


class WordTokenizer:
    """Ids are characters; a message starts with the first letter of its role."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Any) -> list[int]:
        return self.encode("".join(f"{m['role'][0]}:{m['content']}\n" for m in messages) + "a:")


class KnowingEngine:
    """Answers request `i.t` with ``answer(i, t)``, one request per step, last sent first."""

    def __init__(self, answer: Callable[[int, int], str]) -> None:
        self.answer = answer
        self.waiting: list[RequestOutput] = []
        self.prompts: dict[str, str] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> None:
        assert params.greedy and not params.ignore_eos
        self.prompts[request_id] = "".join(map(chr, prompt))
        self.waiting.append(RequestOutput(request_id, None, prompt, [CompletionOutput(0)]))

    def step(self) -> list[RequestOutput]:
        output = self.waiting.pop()
        text = self.answer(*map(int, output.request_id.split(".")))
        output.outputs[0].text, output.outputs[0].token_ids = text, [1] * len(text)
        output.outputs[0].finish_reason, output.finished = "stop", True
        output.kv_cache_details = KVCacheDetails(
            "kara", logical_tokens=100, held_tokens=40, compactions=3
        )
        return [output]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.waiting))


def workload_of(task: str, count: int) -> TaskPrompts:
    return task_prompts(task, count, WordTokenizer(), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", ["chain", "needle-512", "long-chain-1000"])
def test_right_answers_score_one_and_earlier_ones_do_not_count(task: str) -> None:
    workload = workload_of(task, 3)
    engine = KnowingEngine(lambda i, t: workload.samples[i].answers[t])
    figures = score(workload, play(engine, workload))
    assert figures["n"] == 3 and figures["exact_match"] == figures["correct_prefix"] == 1.0
    assert figures["held_over_logical_at_end"] == 0.4
    assert figures["compactions_per_request"] == 3
    assert (
        figures["requests"] == figures["requests_compacted"] == 3 * len(workload.samples[0].turns)
    )
    engine.answer = lambda i, t: "" if i else workload.samples[i].answers[t]
    again = score(workload, play(engine, workload))  # requests have the names of the run before
    assert again["exact_match"] == pytest.approx(1 / 3)


def test_a_wrong_turn_costs_the_sample_and_stays_in_the_history() -> None:
    workload = workload_of("needle-512", 2)
    samples: Sequence[Sample] = workload.samples
    engine = KnowingEngine(lambda i, t: "x" if (i, t) == (1, 1) else samples[i].answers[t])
    figures = score(workload, play(engine, workload))
    assert figures["exact_match"] == 0.5
    assert figures["correct_prefix"] == pytest.approx(7 / 8)
    history = (
        f"a:{samples[1].answers[0]}\nu:{samples[1].turns[1]}\na:x\nu:{samples[1].turns[2]}\na:"
    )
    assert engine.prompts["1.2"] == f"u:{samples[1].turns[0]}\n{history}"


def test_answers_to_a_problem_count_as_their_mean() -> None:
    """Problems with 0, 2 and 1 right answers of 2; the error is over problems."""
    workload = workload_of("chain", 3)
    twice = replace(workload, samples=[s for s in workload.samples for _ in range(2)])
    right = [False, False, True, True, True, False]
    said = [[s.answers[0] if ok else ""] for s, ok in zip(twice.samples, right, strict=True)]
    figures = accuracy(twice, said, 2)
    assert (figures["n"], figures["answers_each"], figures["exact"]) == (3, 2, 3)
    assert figures["exact_match"] == 0.5
    assert figures["exact_match_error"] == pytest.approx(0.5 / 3**0.5)
    assert figures["interval_95"] == wilson_interval(1.5, 3)
    one = accuracy(replace(twice, samples=twice.samples[4:]), said[4:], 2)
    assert one["exact_match_error"] is None and one["exact_match"] == 0.5


def test_drawn_answers_have_seeds_of_their_own(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def noted(**given: Any) -> SamplingParams:
        seeds.append(given["seed"])
        return SamplingParams(**given)

    monkeypatch.setattr(measure, "SamplingParams", noted)
    flags = ("--tasks", "recall", "--num-samples", "2", "--kv-blocks", "99", "--policy", KARA)
    drawn = ("--temperature", "0.9", "--top-p", "0.9", "--n", "3")
    status, saved = bench("eval", *flags, *drawn, "--seed", "5")
    none, kara = saved["rows"]
    assert status == 0 and seeds == [5, 6, 7, 8, 9, 10] * 2
    for row in (none, kara):
        assert (row["n"], row["answers_each"], row["requests"]) == (2, 3, 6)
        assert row["exact_match_error"] == 0.0
    assert (
        "temperature 0.9, top-p 0.9, the seed of answer j to problem i is 5 + 3 i + j"
        in (saved["about"][0])
    )


def test_each_sequence_gets_the_budget_that_it_held(bench: Bench, tmp_path: Path) -> None:
    """More budgets than an engine has policies at once; the cache of each ends as long."""
    file = tmp_path / "lines.jsonl"
    texts = [{"input": "so " * n, "outputs": ["x"]} for n in range(10, 50)]
    file.write_text("\n".join(map(json.dumps, texts)))
    flags = ["--benchmark", f"ruler={file}", "--max-new-tokens", "80"]
    flags += ["--match-bytes-per-sequence", "kara"]
    others = ["--policy", "streaming_llm", "--policy", "rkv:threshold=316,budget=300"]
    status, saved = bench("eval", *flags, "--policy", "none", *others, "--policy", KARA)
    rows = {row["policy_args"]["name"]: row for row in saved["rows"]}
    assert status == 0 and list(rows) == ["none", "streaming_llm", "rkv", "kara"]
    kara, streaming = rows["kara"], rows["streaming_llm"]
    lanes = 2 * 2
    assert len(set(streaming["budgets"])) > 32
    assert sum(streaming["budgets"]) / 40 == kara["held_entries_at_end"] / lanes
    assert streaming["budgets"] == rows["rkv"]["budgets"]
    assert streaming["policy"] == "streaming_llm:budget=per sequence"
    assert streaming["compactions_per_request"] > 0
    assert streaming["output_tokens"] == kara["output_tokens"] == 40 * 80
    assert streaming["held_entries_at_end"] == kara["held_entries_at_end"]
    assert rows["none"]["held_entries_at_end"] > kara["held_entries_at_end"]


def test_every_policy_and_retention_stands_beside_the_full_cache(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tasks", "recall", "needle-512", "--num-samples", "2", "--batch", "2")
    policies = ("--policy", KARA, "--policy", "none", "--retention", "0.2", "0.6")
    status, saved = bench("eval", *flags, *policies, "--seed", "3")
    rows = saved["rows"]
    assert status == 0
    assert [(row["task"], row["retention"]) for row in rows] == [
        (task, retention) for task in ("recall", "needle-512") for retention in (None, 0.2, 0.6)
    ]
    none, low, high = rows[:3]
    assert none["policy"] == "none" and none["held_over_logical_at_end"] == 1.0
    assert low["held_over_logical_at_end"] < high["held_over_logical_at_end"] < 1.0
    assert low["compactions_per_request"] > 0 and low["requests_compacted"] == 2
    assert all(row["n"] == 2 and row["seed"] == 3 for row in rows)
    # 8 tokens a turn never fill a window of 32.
    assert rows[4]["compactions_per_request"] == 0 and rows[4]["held_over_logical_at_end"] == 1.0
    shown = capsys.readouterr().out.splitlines()
    assert sum("never reached" in line for line in shown) == 2


def test_later_turns_may_go_on(bench: Bench) -> None:
    flags = ("--tasks", "needle-512", "--num-samples", "2", "--policy", "snapkv:budget=64")
    off = bench("eval", *flags)[1]["rows"][-1]
    on = bench("eval", *flags, "--continuations", "on")[1]["rows"][-1]
    assert "resumed_turns" not in off and 0 < on["resumed_turns"] <= 2 * 3
