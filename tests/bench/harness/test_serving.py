"""`kvserve bench serve` against a real server, with an engine that is none behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.commands.serving import kv_figures, send_times
from bench.harness.measuring.serving_client import Answer, ServingClient
from bench.harness.measuring.serving_metrics import report_block, summary
from kvserve.server.cli.commands import run
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.server.fake_engine import FakeEngine

INF = float("inf")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    yield from run_server(FakeEngine())


Serve = Any


@pytest.fixture
def serve(server: RunningServer, model_dir: Path, tmp_path: Path) -> Serve:
    """Run the command against the server; returns its status and what it saved."""

    def run_command(*flags: str, url: str = server.url) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "serve.json"
        where = ("--base-url", url, "--tokenizer", str(model_dir), "--save-result", str(file))
        status = run(["bench", "serve", *where, "--disable-tqdm", *flags])
        return status, json.loads(file.read_text()) if file.exists() else {}

    return run_command


def custom(tmp_path: Path, *prompts: str) -> tuple[str, ...]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    count = str(len(prompts))
    return ("--dataset", "custom", "--dataset-path", str(path), "--num-prompts", count)


# ---- when requests are sent -------------------------------------------------------------------


def test_arrivals_keep_their_rate_and_burst_as_asked() -> None:
    assert send_times(3, INF, 1.0, 0) == [0.0, 0.0, 0.0]
    even, poisson, bursts = (
        np.diff(send_times(2000, 10.0, burstiness, seed=1)) for burstiness in (100.0, 1.0, 0.1)
    )
    assert send_times(2000, 10.0, 0.1, seed=1)[-1] == pytest.approx(200)
    for gaps, deviation in ((even, 0.1), (poisson, 1.0), (bursts, 10**0.5)):
        assert gaps.min() >= 0
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.15)
    assert send_times(9, 10.0, 1.0, seed=1) != send_times(9, 10.0, 1.0, seed=2)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramps_go_from_one_rate_to_another(strategy: str) -> None:
    gaps = np.diff(send_times(101, INF, 1e6, 0, (strategy, 2.0, 8.0)))
    assert 1 / gaps[0] == pytest.approx(2.0, rel=0.05)
    assert 1 / gaps[-1] == pytest.approx(8.0, rel=0.05)
    assert 1 / gaps[49] == pytest.approx(5.0 if strategy == "linear" else 4.0, rel=0.05)


# ---- figures ----------------------------------------------------------------------------------


def answer(sent: float, *arrivals: float, error: str = "") -> Answer:
    """A stream that says how many tokens there are so far."""
    made = Answer(sent, error=error)
    for count, at in enumerate(arrivals, start=1):
        usage = {"prompt_tokens": 10, "completion_tokens": count}
        made.take({"choices": [{"text": "a"}], "usage": usage}, at)
    return made


def test_figures_are_those_of_the_requests_that_succeeded() -> None:
    answers = [
        answer(100.0, 100.5, 100.6, 101.1),
        answer(100.2, 100.3, 100.4),
        answer(101.5, 102.0),
        answer(100.0, 109.0, error="lost"),
    ]
    metrics, percentiles = ["ttft", "tpot", "itl", "e2el"], [50.0, 99.0]
    limits = {"ttft": 500.0, "tpot": 200.0}
    result = summary(answers, 4.0, metrics=metrics, percentiles=percentiles, goodput=limits)
    assert (result["completed"], result["failed"]) == (3, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 6)
    assert result["request_throughput"] == 0.75 and result["output_throughput"] == 1.5
    assert result["total_token_throughput"] == 9.0
    assert result["request_goodput"] == 0.5  # the first one's tokens take 300 ms each
    assert result["max_output_tokens_per_s"] == 4 and result["max_concurrent_requests"] == 2
    assert result["mean_ttft_ms"] == pytest.approx(1100 / 3)
    assert result["median_tpot_ms"] == pytest.approx((300 + 100) / 2)
    assert result["mean_itl_ms"] == pytest.approx((100 + 500 + 100) / 3)
    assert result["p99_e2el_ms"] == pytest.approx(np.percentile([1100, 200, 500], 99))
    block = "\n".join(report_block(result, metrics, percentiles))
    assert "============ Serving Benchmark Result ============" in block
    assert "Failed requests:                         1" in block
    assert "P99 E2EL (ms):" in block and "KV cache" not in block


def test_later_turns_have_figures_of_their_own() -> None:
    answers = [
        Answer(0.0, prompt_len=30, ttft=1.0),
        Answer(2.0, prompt_len=45, ttft=0.2, turn=1, cached=33, kv={"logical_tokens": 48,
               "held_tokens": 24, "compactions": 1, "blocks_released": 2, "resumed_tokens": 33}),
        Answer(3.0, prompt_len=45, ttft=0.4, turn=1, cached=20),
        Answer(3.0, turn=1, error="gone"),
    ]  # fmt: skip
    figures = kv_figures(answers, [])
    assert figures["prompt_tokens_computed"] == 30 + 12 + 25 and figures["resumed_turns"] == 1
    assert figures["median_follow_up_ttft_ms"] == pytest.approx(300)
    assert "median_follow_up_ttft_ms" not in kv_figures(answers[:1], [])


# ---- against a server -------------------------------------------------------------------------

VLLM_KEYS = {
    *("date", "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness"),
    *("max_concurrency", "duration", "completed", "failed", "total_input_tokens", "label"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
    *(f"{of}_{name}_ms" for of in ("mean", "median", "std", "p99") for name in ("ttft", "itl")),
}
DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
}


def test_random_prompts_at_a_rate(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "6", "--input-len", "12", "--output-len", "5", "--num-warmups", "1")
    traffic = ("--request-rate", "60", "--max-concurrency", "2", "--metadata", "a=b", "c=d")
    status, saved = serve(*flags, *traffic)
    assert status == 0 and saved["complete"] and saved["benchmark"] == "serve"
    assert saved.keys() >= VLLM_KEYS and not saved.keys() & DETAILS
    assert saved["model_id"] == MODEL and (saved["a"], saved["c"]) == ("b", "d")
    assert (saved["completed"], saved["failed"], saved["unfinished"]) == (6, 0, 0)
    assert saved["total_output_tokens"] == 30 and saved["max_concurrent_requests"] <= 2
    assert saved["compactions"] == 0 and saved["duration"] > 5 / 60
    assert "Maximum request concurrency:             2" in capsys.readouterr().out


def test_chats_of_a_file_with_details(serve: Serve, tmp_path: Path) -> None:
    prompts = custom(tmp_path, "one", "two", "SAY[a\u2028b\u0085]")  # no ends of lines
    flags = ("--custom-output-len", "4", "--ignore-eos", "--save-detailed")
    status, saved = serve("--backend", "openai-chat", *prompts, *flags)
    assert status == 0 and saved.keys() >= DETAILS
    assert saved["output_lens"] == [4, 4, 4] and saved["errors"] == ["", "", ""]
    assert all(len(gaps) <= 3 for gaps in saved["itls"]) and min(saved["ttfts"]) > 0
    assert sorted(saved["generated_texts"]) == ["0 1 2 3 ", "0 1 2 3 ", "a\u2028b\u0085"]


def test_vllm_s_form(server: RunningServer, model_dir: Path, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    where = ["--host", "127.0.0.1", "--port", port, "--tokenizer", str(model_dir)]
    words = ["bench", "serve", "--backend", "vllm", "--dataset-name", "random", *where]
    words += ["--num-prompts", "1", "--random-input-len", "4", "--random-output-len", "2"]
    words += ["--disable-tqdm", "--save-result", "--result-dir", str(tmp_path)]
    assert run([*words, "--result-filename", "named.json"]) == 0
    assert json.loads((tmp_path / "named.json").read_text())["backend"] == "vllm"
    assert run(words) == 0
    [other] = set(tmp_path.glob("*.json")) - {tmp_path / "named.json"}
    assert re.fullmatch(r"vllm-infqps-model-\d{8}-\d{6}\.json", other.name)


def test_refused_requests_are_counted_and_named(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--num-prompts", "2", "--input-len", "600", "--output-len", "5")
    status, saved = serve(*flags)
    assert status == 0 and (saved["completed"], saved["failed"]) == (0, 2)
    shown = capsys.readouterr().out
    assert "failed: HTTP 400" in shown and "TTFT" not in shown
    assert "mean_ttft_ms" not in saved


def test_a_server_that_dies_is_reported_not_averaged(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--backend", "openai-chat", *custom(tmp_path, "one", "DIE", "SLOW", "SLOW"))
    for server in run_server(FakeEngine()):
        status, saved = serve(*flags, "--ignore-eos", "--max-concurrency", "1", url=server.url)
    assert status == 1 and not saved["complete"]
    assert saved["completed"] == 1 and "output_throughput" not in saved
    assert saved["failed"] + saved["unfinished"] >= 1
    shown = capsys.readouterr().out
    assert "the server stopped answering after" in shown
    assert "Serving Benchmark Result" not in shown and "tok/s" not in shown


def test_ctrl_c_keeps_what_was_answered(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, asked = ServingClient.ask, []

    async def ask(self: ServingClient, body: Any) -> Answer:
        asked.append(body)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return await real(self, body)

    monkeypatch.setattr(ServingClient, "ask", ask)
    flags = ("--num-prompts", "5", "--input-len", "4", "--output-len", "3")
    status, saved = serve(*flags, "--max-concurrency", "1")
    assert status == 130 and not saved["complete"]
    assert saved["completed"] == 2 and saved["unfinished"] == 1
    assert "cut short" in capsys.readouterr().out


def test_nobody_there(serve: Serve, nobody: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, saved = serve("--ready-check-timeout-sec", "0", url=nobody)
    assert status == 1 and not saved
    assert f"no server answers at {nobody}" in capsys.readouterr().err


def test_a_server_that_wants_a_key_is_named(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said to list no model."""
    for server in run_server(FakeEngine(), api_key=("a",)):
        assert serve("--num-prompts", "1", url=server.url)[0] == 1
        assert "--api-key: the server answers HTTP 401" in capsys.readouterr().err
        key = ("--api-key", "a", "--num-prompts", "1", "--input-len", "4")
        assert serve(*key, url=server.url)[1]["completed"] == 1
