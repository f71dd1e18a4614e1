"""``kvserve calibrate``: what it measures, in which pieces, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.commands.calibrate import QueryCensus
from kvserve import LLM, SamplingParams
from kvserve.engine.compression.query_statistics import QueryStatistics, load_statistics
from kvserve.log import ConfigError
from kvserve.server.cli.commands import run
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import load_dense

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 128
PROMPTS = random_prompts([90, 40, 3])


def measured(directory: Path, **settings: Any) -> QueryStatistics:
    how: dict[str, Any] = {"dtype": "float32", "enable_prefix_caching": False, **settings}
    llm = LLM(str(directory), skip_tokenizer_init=True, **how)
    runner = llm.engine.core.runner
    census = QueryCensus(runner.model, runner.cache)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    llm.generate(PROMPTS, params, use_tqdm=False)
    census.close()
    assert runner.cache.on_queries is None
    return census.found()


@pytest.mark.parametrize(
    ("kind", "changes", "settings"),
    [
        ("llama", {"rope_parameters": YARN}, {}),
        ("llama", {}, {"max_num_batched_tokens": 7, "max_num_seqs": 3}),  # chunks do not matter
        *(("qwen3", {}, {}), ("gemma3", {}, {}), ("gpt-oss", {}, {})),
    ],
)
def test_against_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Queries before RoPE, behind the norm where a model has one, in layers with windows too."""
    directory = write_checkpoint(kind, tmp_path, **changes)
    found = measured(directory, **settings)
    model = load_dense(directory)
    layers = model.model.layers
    seen: list[list[Tensor]] = [[] for _ in layers]
    for layer, out in zip(layers, seen, strict=True):
        attention: Any = layer.self_attn
        last = attention.q_norm if hasattr(attention, "q_norm") else attention.q_proj
        last.register_forward_hook(lambda _, __, x, out=out: out.append(x[0]))
    for prompt in PROMPTS:
        with torch.no_grad():
            model(torch.tensor([prompt]))
    heads, dim = found.mean.shape[1:]
    for n, parts in enumerate(seen):
        if kind == "gemma3":  # whose norm takes heads first
            parts = [x.transpose(0, 1) for x in parts]
        queries = torch.cat([x.reshape(-1, heads, dim) for x in parts]).double()
        magnitude = queries.unflatten(-1, (2, -1)).norm(dim=-2).mean(dim=0)
        scale = float(magnitude.max()) * 1e-5
        torch.testing.assert_close(found.mean[n].double(), queries.mean(0), atol=scale, rtol=0)
        torch.testing.assert_close(found.magnitude[n].double(), magnitude, atol=scale, rtol=0)
    assert found.tokens == sum(map(len, PROMPTS))


def test_a_released_file_gives_the_same_sets(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    statistics = load_statistics(directory / "triattention.stats")
    statistics.save(tmp_path / "released.pt")
    answers = []
    for stats in (None, str(tmp_path / "released.pt")):
        policy = {"name": "triattention", "budget": 20, "period": 4, "stats": stats}
        policy |= {"protect_prompt": False}
        llm = LLM(str(directory), policy=policy, skip_tokenizer_init=True, dtype="float32")
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        assert output.kv_cache_details.compactions > 10
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    again = load_statistics(tmp_path / "released.pt")
    assert torch.equal(again.mean, statistics.mean)
    assert torch.equal(again.magnitude, statistics.magnitude)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held["metadata"].update(rope_style="interleaved"), "rope_style"),
        (lambda held: held["metadata"]["sampled_heads"].pop(), "all are needed"),
        (lambda held: held.pop("stats"), "stats"),
        # Code is not run.
        (lambda held: held.update(metadata=Path("/")), r"x\.pt is not a file of kvserve calibrate"),
    ],
)
def test_released_files_that_do_not_serve(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "x.pt"
    QueryStatistics(torch.rand(2, 3, 8), torch.rand(2, 3, 4), 1, "").save(path)
    held = torch.load(path, weights_only=True)
    change(held)
    torch.save(held, path)
    with pytest.raises(ConfigError, match=message):
        load_statistics(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "out.safetensors"
    text.write_text("The red box is in the hall. " * 200)
    flags = ["calibrate", "--text", str(text), "--output", str(output), "--tokens", "300"]
    assert run([*flags, "--max-model-len", "128", "--disable-tqdm"]) == 0
    printed = capsys.readouterr().out
    assert "concentration of kvserve/tiny's queries" in printed and f"saved to {output}" in printed
    assert load_statistics(output).tokens == 300
    assert 0 < float(load_statistics(output).concentration.min()) <= 1
