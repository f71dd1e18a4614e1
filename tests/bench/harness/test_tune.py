"""`kvserve tune`: sums by hand, what it follows beside what an engine holds, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.harness.commands.tune import follow, request_bytes, weights_bytes
from bench.harness.setup.checkpoint import LARGE_SHAPES
from kvserve import LLM, SamplingParams
from kvserve.engine.models.spec import parse_spec
from kvserve.engine.policies.registry import make_policy
from kvserve.entry_format import entry_format
from kvserve.server.cli import commands as cli
from tests.checkpoints import write_checkpoint
from tests.thinning import slow

KARA = {"name": "kara", "window": 32, "buffer": 8, "ratio": 0.25, "period": 8}


def tune(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "tune.json"
    status = cli.run(["tune", *flags, "--save-result", str(file)])
    return status, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize(
    "policy",
    [
        KARA,
        {"name": "snapkv", "trigger": "threshold", "budget": 24, "threshold": 40, "window": 4},
        *slow({"name": "streaming_llm", "budget": 48}, {"name": "none"}),
    ],
    ids=lambda policy: policy["name"],
)
def test_it_follows_what_an_engine_holds(policy: dict[str, Any]) -> None:
    """What ``n`` steps hold in all, less what ``n - 1`` do, is what the last of them holds."""
    llm = LLM("kvserve/tiny", policy=policy, kv_cache_memory=2**22, enforce_eager=True)
    prompt = list(range(5, 35))

    def total(steps: int) -> float:
        return steps * follow(make_policy(policy), len(prompt), steps).mean

    found = follow(make_policy(policy), len(prompt), 200)
    if policy["name"] == "kara":  # 30 tokens, 6 of each of 8 windows of 24, and its log
        assert found.mean_logged < found.most_logged <= 40 and found.most <= 30 + 6 * 8 + 40
    for steps in (20, 60, 61, 62, 63, 64, 100, 150):
        sampling = SamplingParams(max_tokens=steps + 1, ignore_eos=True, temperature=0.0)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        details = output.kv_cache_details
        assert details is not None and details.logical_tokens == len(prompt) + steps
        assert details.held_tokens == pytest.approx(total(steps) - total(steps - 1) + 0.5)


def test_the_sums_of_a_32b_model_with_4_bits_on_two_cards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--quantization", "4", "--device", "a6000", "--tensor-parallel-size", "2")
    status, saved = tune(tmp_path, "--model", "32B", *flags)
    assert status == 0 and saved["device"]["type"] == "arithmetic"
    layers = 64 * (5120 * 128 * 2 * (64 + 8) + 3 * 5120 * 25600 + 2 * (5120 + 128)) + 5120
    weights = layers * 4.156 / 8 + 2 * 2 * 151936 * 5120
    pool = 2 * (0.9 * 48 - 1.5) * 2**30 - weights
    by_name = {(row["policy"], row["kv_cache_dtype"]): row for row in saved["rows"]}
    none, kara = by_name["none", "auto"], by_name["kara", "auto"]
    token = 2 * 64 * 8 * 128 * 2
    assert none["pool_entries"] == pytest.approx(pool / token)
    assert none["request_mib"] == pytest.approx(3500 * token / 2**20)
    assert none["at_once"] == int(pool / (3500 * token)) < kara["at_once"]
    assert by_name["none", "k8v4"]["at_once"] > 2 * none["at_once"]
    read = weights - 2 * 151936 * 5120 + none["at_once"] * 2000 * token
    assert none["most_tok_s"] == pytest.approx(none["at_once"] * 2 * 0.768e12 / read)
    assert 1 < kara["most_speed_up"] < kara["at_once_ratio"]
    shown = capsys.readouterr().out
    assert "ARITHMETIC, nothing was run" in shown and "take --quantization 16" in shown


def test_what_lies_beside_a_request_s_entries() -> None:
    spec = parse_spec(LARGE_SHAPES["gpt-oss-20b"], "gpt-oss-20b")
    form, entry = entry_format("auto", 2), 2 * 8 * 64 * 2
    none, kara = make_policy({"name": "none"}), make_policy({"name": "kara"})
    mean, most = request_bytes(spec, none, form, follow(none, 100, 1000), has_fp8=True)
    assert mean == 12 * entry * (600 + 128) and most == 12 * entry * (1100 + 128)
    held = follow(kara, 100, 1000)
    log = held.most_logged * 12 * 64 * (64 // 2 + 4)  # 64 heads of 64 numbers in 4 bits
    _, most = request_bytes(spec, kara, form, held, has_fp8=True)
    remainder = 12 * 8 * (2 * 64 * 2 + 4)
    assert most == pytest.approx(12 * entry * (held.most + 128) + log + remainder, rel=0.02)
    held_bytes, read = weights_bytes(spec, 16, Path())
    assert held_bytes - read == 2 * 201088 * 2880


def test_it_says_what_does_not_fit_and_what_does_not_pay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_dir: Path
) -> None:
    status, saved = tune(tmp_path, "--model", "70B", "--device", "h100")
    assert status == 0 and saved["rows"] == []
    assert "more cards, or weights of fewer bits" in capsys.readouterr().out
    lengths = ("--input-len", "10", "--output-len", "20")
    status, saved = tune(tmp_path, "--model", str(model_dir), "--device", "h200", *lengths)
    assert status == 0 and {row["at_once"] for row in saved["rows"]} == {256}
    assert {row["kv_cache_dtype"] for row in saved["rows"]} == {"auto", "int8"}  # heads of 8
    few = ("--kv-cache-dtype", "auto", "--policy", "kara")
    tune(tmp_path, "--shape", "qwen3-4b", "--device", "h100", *lengths, *few)
    assert "take --policy none" in capsys.readouterr().out


def test_the_sums_of_a_model_whose_layers_keep_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen 3.5 of 9B's shape: every fourth of 32 layers holds entries, the others a state of
    32 heads [128, 128] in float32 and 3 inputs of 8,192 channels, for each of 64 requests and of 32
    that later prompts begin with."""
    config = AutoConfig.for_model("qwen3_5_text")
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    flags = "--device", "h100", "--max-num-seqs", "64", "--kv-cache-dtype", "auto"
    status, saved = tune(tmp_path, "--model", str(tmp_path), *flags, "--policy", "kara")
    assert status == 0 and "states of 64 requests, 49.1 MiB each" in capsys.readouterr().out
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    state = 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    pool = (0.9 * 79.6 - 1.5) * 2**30 - weights - (64 + 32) * state
    token = 2 * 8 * config.num_key_value_heads * config.head_dim * 2
    none = saved["rows"][0]
    assert none["pool_entries"] == pytest.approx(pool / token)
    assert none["request_mib"] == pytest.approx((3500 * token + state) / 2**20)


def test_a_form_that_windows_of_other_heads_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in the engine's words."""
    model = write_checkpoint("gemma4", tmp_path / "model")
    flags = "--model", str(model), "--device", "l4", "--input-len", "10", "--output-len", "20"
    status, saved = tune(tmp_path, *flags, "--kv-cache-dtype", "auto", "k8v4")
    assert status == 0 and {row["kv_cache_dtype"] for row in saved["rows"]} == {"auto", "k8v4"}
    assert tune(tmp_path / "none", *flags, "--kv-cache-dtype", "auto", "3bit") == (2, {})
    assert "dtype 3bit: the model's layers with windows have other" in capsys.readouterr().err
