"""`kvserve eval --fidelity`: forced texts equal decoding, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.harness.measuring.fidelity import ForcedText, LogProbs, fidelity
from kvserve.config import EngineConfig
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.sampling_params import SamplingParams
from kvserve.scheduler.blocks.window_group import WindowGroup
from tests.bench.harness.conftest import Bench
from tests.checkpoints import write_checkpoint

KARA = {"window": 64, "buffer": 8}
LENGTH, PROMPT = 330, 40


def build(policy: str, **fields: Any) -> LLMEngine:
    config = EngineConfig.from_flat(
        model="kvserve/tiny",
        dtype="float32",
        policy=policy,
        policy_args=fields,
        num_gpu_blocks_override=128,
        max_num_batched_tokens=100,
        max_num_seqs=2,
        enable_prefix_caching=False,
        async_scheduling=False,
    )
    return LLMEngine(config)


def texts(count: int) -> list[ForcedText]:
    ids = np.random.default_rng(0).integers(2, 200, (count, LENGTH), np.int32)
    return [ForcedText(str(i), row, PROMPT) for i, row in enumerate(ids)]


def test_forcing_a_text_equals_decoding_it() -> None:
    """The same likelihoods, and as many events, though tokens are computed in chunks."""
    given = texts(2)
    full: LogProbs = {}
    own = fidelity(build("none"), given, full)
    assert all(figures.kl.abs().max() < 1e-6 for figures in own)
    [forced, _] = fidelity(build("kara", **KARA), given, full)
    engine, seen = build("kara", **KARA), list[Tensor]()
    tokens, runner = torch.from_numpy(given[0].token_ids.astype(np.int64)), engine.core.runner
    logits = runner.model.logits

    def noted(hidden: Tensor) -> Tensor:
        seen.append(logits(hidden)[:1].clone())
        return logits(hidden)

    runner.model.logits = noted  # type: ignore[method-assign]
    runner.force = lambda positions: tokens[positions.clamp(max=LENGTH - 1)]
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH - PROMPT, ignore_eos=True)
    engine.add_request("0", given[0].token_ids[:PROMPT].tolist(), params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests:
        outputs = engine.step() or outputs
    log_probs = torch.cat(seen).log_softmax(dim=-1)[: LENGTH - PROMPT]
    nll = -log_probs.gather(1, tokens[PROMPT:, None])[:, 0]
    assert forced.events == len(outputs[0].compactions) > 2
    torch.testing.assert_close(forced.nll, nll, atol=1e-4, rtol=0)
    assert forced.kl.max() > 1e-4, "an event changes what follows"


def test_bytes_are_those_of_the_second_half() -> None:
    given = texts(1)
    engine = build("none")
    entry = engine.core._sequences.block_bytes / engine.core.scheduler.layout.block_size
    [own] = fidelity(engine, given, {})
    # Of 290 forced tokens the second half: 185 to 329 are held when each of them is predicted.
    assert own.mean_bytes(given[0]) == pytest.approx(entry * (185 + 329) / 2, rel=0.005)
    assert own.bytes_at_end(given[0]) == entry * (LENGTH - 1)


@pytest.mark.usefixtures("few_newest")
def test_windows_are_held_as_decoding_holds_them(tmp_path: Path) -> None:
    """Of layers with windows, and of newest tokens as they were computed: a chunk needs more at
    once, which does not count."""
    directory = write_checkpoint("gemma3", tmp_path, head_dim=64)
    ids = np.random.default_rng(0).integers(2, 120, 180, np.int32)
    found = []
    for chunk in (16, 170):
        config = EngineConfig.from_flat(
            model=str(directory),
            dtype="float32",
            kv_cache_dtype="k4v4",
            max_num_batched_tokens=chunk,
            max_num_seqs=1,
            enable_prefix_caching=False,
            async_scheduling=False,
            skip_tokenizer_init=True,
        )
        engine = LLMEngine(config)
        found.append(fidelity(engine, [ForcedText("0", ids, PROMPT)], {})[0].held)
    assert np.array_equal(found[0], found[1]) and found[0].max() > found[0][0]
    params = SamplingParams(temperature=0.0, max_tokens=140, ignore_eos=True)
    engine.add_request("0", ids[:PROMPT].tolist(), params)
    scheduler, steps = engine.core.scheduler, 0
    windows = [group for group in scheduler.blocks.groups if isinstance(group, WindowGroup)]
    assert [group.kind for group in windows] == ["windows", "newest"]
    while engine.has_unfinished_requests:
        engine.step()
        computed = scheduler.rows.num_computed[: len(scheduler.running)]
        if len(computed) and computed[0] > PROMPT:
            steps += 1
            for group in windows:
                columns = -(-group.held_behind(computed) // group.block_tokens)
                assert np.array_equal(columns * group.tables[0].num_lanes, group.blocks_of_rows(1))
    assert steps > 130


def test_the_command(bench: Bench, tmp_path: Path) -> None:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(str(i * i) for i in range(500)))
    flags = ["--fidelity", "--text", str(text), "--text-len", "300", "--num-samples", "2"]
    flags += ["--facts", "1", "--save-plots", str(tmp_path), "--compare-kv-cache-dtypes", "auto"]
    policies = ["kara:window=64,buffer=8", "kara:window=4096,buffer=8", "snapkv:budget=64@int8"]
    status, result = bench("eval", *flags, "int8", *(f"--policy={each}" for each in policies))
    assert status == 0 and (tmp_path / "fidelity.png").exists()
    rows = {(row["policy"], row["kv_cache_dtype"]): row for row in result["rows"]}
    assert len(rows) == 7 and rows["snapkv:budget=64", "int8"]["of_full"] < 0.5
    none, never = rows["none", "auto"], rows["kara:window=4096,buffer=8", "auto"]
    assert never["kl"] == none["kl"] == 0.0 and never["events_per_text"] == 0
    assert none["of_full"] == 1.0 and rows["none", "int8"]["of_full"] < 0.6
    kara = rows["kara:window=64,buffer=8", "auto"]
    assert kara["of_full"] < 0.9 and kara["kl"] != 0 and kara["n"] == 2
    assert len(kara["curve"]) == 16 and kara["curve"][0] == 0.0
    assert all(row["facts"] == 0.0 for row in result["rows"]), "random weights know nothing"


def test_bytes_are_matched_on_a_piece_that_does_not_count(bench: Bench, tmp_path: Path) -> None:
    """The others are the pieces of a run without."""
    text = tmp_path / "words.txt"
    text.write_text(" ".join(str(i * i) for i in range(500)))
    flags = ["--fidelity", "--text", str(text), "--text-len", "200", "--num-samples", "2"]
    flags += ["--policy", "kara:window=64,buffer=8"]
    _, alone = bench("eval", *flags)
    matched = ["--policy", "streaming_llm:period=8", "--match-bytes", "kara"]
    _, beside = bench("eval", *flags, *matched)
    assert beside["rows"][:2] == alone["rows"] and len(beside["rows"]) == 3
    assert beside["rows"][1]["kl"] != 0


def test_the_full_caches_own_answers(bench: Bench) -> None:
    flags = ["--fidelity", "--from-answers", "--tasks", "chain", "--num-samples", "2"]
    flags += ["--temperature", "0.7", "--text-len", "128", "--policy", "kara:window=32,buffer=4"]
    status, result = bench("eval", *flags)
    assert status == 0 and [row["n"] for row in result["rows"]] == [2, 2]
    assert result["rows"][0]["nll"] > 0 and result["rows"][1]["kl"] != 0
