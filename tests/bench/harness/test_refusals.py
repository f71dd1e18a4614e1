"""What the commands refuse: in one line, which names the flag or says what is missing."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench.harness.commands import evaluate, throughput
from bench.harness.setup import checkpoint
from kvserve.server.cli.commands import run
from tests.bench.harness.conftest import Bench

WRONG = r"""
bench throughput --policy karo | karo
bench throughput --policy kara:windw=3 | windw
bench throughput --policy kara:window | window
bench throughput --policy kara@k9 | 'k9' after @ is none of auto
bench throughput --policy none --policy none@int8 | --pool-shares
bench throughput --policy kara:window=8,buffer=9 | buffer
bench throughput --policy '{"window": 8}' | names no policy
bench throughput --policy '{nonsense' | JSON
bench throughput --policy kara --policy.windw 3 | windw
bench throughput --policy kara --policy kara --policy.window 64 | --policy.FIELD
bench throughput --pool-share 0.2 --kv-blocks 9 | --kv-blocks
bench throughput --pool-share 0 | --pool-share
bench throughput --num-prompts 0 | --num-prompts
bench throughput --dataset chain --input-len 8 | --input-len
bench throughput --dataset chain --shape 4m | --shape
bench throughput --dataset chian | chian
bench throughput --dataset chain --no-ignore-eos | --ignore-eos
bench throughput --dataset custom | --dataset-path
bench throughput --dataset-path x | --dataset-path
bench throughput --custom-output-len 3 | --custom-output-len
bench throughput --skip-chat-template | --skip-chat-template
bench throughput --random-range-ratio 1.5 | --random-range-ratio
bench throughput --compare-prefix-caching --no-enable-prefix-caching | --compare-prefix-caching
bench throughput --save-result results.txt | results.txt
bench throughput --compare-speculation | --speculative-config
bench throughput --speculative-config ngram | --speculative-config
bench throughput --nonsense | --nonsense
bench serve --goodput itl:5 | --goodput
bench serve --percentile-metrics ttft,tps | --percentile-metrics
bench serve --metric-percentiles 101 | --metric-percentiles
bench serve --extra-body [] | --extra-body
bench serve --metadata x | --metadata
bench serve --ramp-up-strategy linear | --ramp-up-start-rps
bench serve --request-rate 0 | --request-rate
bench serve --result-dir x | --result-dir
bench serve --save-result a.json --result-filename b.json | --result-filename
bench serve --dataset timed_trace --dataset-path x --request-rate 2 | --request-rate
bench serve --backend openai-chat | --backend
eval --benchmark mmlu=x | with one of ruler, gsm8k, math, aime, longbench
eval --max-new-tokens 5 | --max-new-tokens
eval --tasks | --tasks
eval --tasks needle-7 | needle-7
eval --retention 0.2 --policy kara:ratio=0.3 | --retention
eval --retention 2 | --retention
eval --retention 0.01 --policy kara:window=32,buffer=40 | --policy
eval --retention 0.01 --policy kara:window=32,buffer=4,chunk_budget=2,max_chunk=4 | --retention
eval --num-samples -1 | --num-samples
eval --n 4 | --n needs --temperature
eval --top-p 0.9 | --top-p needs --temperature
eval --match-bytes-per-sequence none | no --policy that drops
eval --match-bytes-per-sequence 5000 | no --policy that drops
eval --match-bytes-per-sequence kara --policy kara | needs another --policy
eval --match-bytes-per-sequence kara --policy kara --policy kara:ratio=0.4 | no budget that bounds
eval --match-bytes-per-sequence kara --match-bytes 9 --policy kara | excludes --match-bytes
eval --facts 2 | --facts needs --fidelity
eval --from-answers | --from-answers needs --fidelity
eval --fidelity --n 2 --temperature 1 | --n is for answers that are graded
eval --fidelity --match-bytes-per-sequence kara | --match-bytes-per-sequence is for
eval --fidelity --temperature 1 | --temperature is of the answers
eval --fidelity --facts 99 | --facts: at most
eval --fidelity --tasks chain | --fidelity reads --text
eval --fidelity --from-answers | --from-answers needs --tasks
eval --fidelity --from-answers --text a --tasks chain | leave --text
eval --fidelity --policy all | --policy
eval --benchmark gsm8k=a/x.jsonl --benchmark math=b/x.jsonl | the same name
eval --num-fewshot 8 | --num-fewshot is for --benchmark gsm8k=, math=, aime=
eval --benchmark ruler=x.jsonl --num-fewshot 8 | --num-fewshot is for
eval --benchmark math=x.jsonl --fewshot-file y | --fewshot-file needs
tune --model 8B | --device
tune --kl 0.1 | --frontier FILE
tune --frontier absent.json | needs --kl, --bytes or --speed
tune --model 8B --device l4 --output-len 200000 | longest context
tune --model 8B --device l4 --policy snapkv | budget
tune --model 8B --device l4 --policy kara@k8v4 | --kv-cache-dtype
"""
FAILED = """
eval --fidelity --text /nowhere.txt | --text: /nowhere.txt
tune --frontier absent.json --kl 1 | No such file
tune --frontier pyproject.toml --kl 1 | no result of
tune --shape qwen3-8b --device h100 --tensor-parallel-size 3 | 3 ranks
tune --model 8B --device h100 --policy kara:preset=paper | do not follow from a request alone
"""
CASES = [(2, line) for line in WRONG.strip().splitlines()]
CASES += [(1, line) for line in FAILED.strip().splitlines()]


@pytest.mark.parametrize(("status", "line"), CASES)
def test_mistakes_are_named_in_one_line(
    status: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if status == 2:  # before anything is measured
        for command in (evaluate, throughput):
            monkeypatch.setattr(command, "run_benchmark", lambda *_: 0)
    words, _, named = line.partition(" | ")
    assert run(shlex.split(words)) == status
    error = capsys.readouterr().err
    name = words[: words.index(" -")]
    assert error.startswith(f"kvserve {name}: error: ") and error.count("\n") == 1
    assert named in error


@pytest.mark.parametrize(
    "command",
    [
        "eval --tasks chain",
        "eval --tasks chain --match-bytes kara --policy snapkv:trigger=threshold",
        "eval --fidelity",
        "bench throughput --dataset random --num-prompts 2",
    ],
)
def test_what_the_model_refuses_is_said_before_the_first_run(
    command: str,
    bench: Bench,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As of the last row, behind all others: a window that is longer than the context."""

    def build(*_: object) -> None:
        raise AssertionError("something has run")

    monkeypatch.setattr(checkpoint, "LLMEngine", build)
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 400)
    words = [*command.split(), *(["--text", str(text)] if "--fidelity" in command else [])]
    name = " ".join(words[: 2 if words[0] == "bench" else 1])
    flags = words[len(name.split()) :]
    status, _ = bench(name, *flags, "--policy", "kara", "--policy", "kara:window=5000")
    assert status == 1
    assert "--policy.window: 5000 exceeds the context of 4096" in capsys.readouterr().err
