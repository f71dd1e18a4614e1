"""Logits of every family and RoPE type beside transformers', token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvserve import SamplingParams
from kvserve.log import ConfigError, RequestError
from tests.checkpoints import generate, random_prompts, write_checkpoint
from tests.engine.dense_reference import dense_pass, load_dense
from tests.engine.models.decoding import check_parity, make, row_of, tokens
from tests.engine.recorder import Recorder
from tests.thinning import slow

TOKENS = 40
PROMPTS = random_prompts([5, 90, 1, 33])
CHUNKED = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0},
}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama-mha-tied": {},
    "mistral": {"head_dim": 32},  # as in Nemo: heads wider than hidden_size / num_attention_heads
    "mistral-window": {"sliding_window": 24},
    "gemma2": {},
    "gemma3": {},
    "gemma3-scaled": {
        "query_pre_attn_scalar": 9,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    },
    "gpt-oss": {},
    "gpt-oss-yarn": {
        "rope_parameters": {
            **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "truncate": False},
            "original_max_position_embeddings": 64,
        }
    },
    "internlm2": {"max_position_embeddings": 100},  # the longest prompt's answer goes past them
    "granite": {},
    "mixtral": {},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen3": {},
    "qwen3-moe": {},
    "smollm3": {},
    "smollm3-window": {"use_sliding_window": True, "sliding_window": 24},
}


def kind_of(family: str) -> tuple[str, str]:
    """The kind of checkpoint, and what is different about it."""
    kind, _, varied = family.rpartition("-")
    return (kind, varied) if varied in ("window", "scaled", "yarn") else (family, "")


FEW = ("gemma3-scaled", "gpt-oss-yarn", "internlm2", "mixtral", "olmo2", "phi3", "smollm3-window")
"""Those that share least with one another."""


@pytest.mark.parametrize("family", [*FEW, *slow(*(f for f in FAMILIES if f not in FEW))])
def test_families(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(kind_of(family)[0], tmp_path, **FAMILIES[family])
    expected = generate(directory, PROMPTS, TOKENS)
    check_parity(directory, PROMPTS, expected)
    check_parity(directory, PROMPTS, expected, **CHUNKED)


@pytest.mark.parametrize("family", ["llama", *slow("mistral", "qwen2", "qwen3")])
def test_bfloat16_is_as_close_as_transformers_is_to_itself(family: str, tmp_path: Path) -> None:
    """Its eager and sdpa attention round differently; so may ours, but no more than that."""
    directory = write_checkpoint(family, tmp_path)
    sequences = random_prompts([len(prompt) + TOKENS for prompt in PROMPTS], seed=5)
    llm = make(directory, dtype="bfloat16")
    recorder, runner = Recorder(llm), llm.engine.core.runner
    logits: dict[str, list[Tensor]] = {"ours": [], "eager": [], "sdpa": []}
    models = {
        name: AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation=name
        )
        for name in ("eager", "sdpa")
    }
    for i, sequence in enumerate(sequences):
        start = len(sequence) - TOKENS
        given = torch.tensor([*sequence, 0])
        runner.force = given.__getitem__
        tokens(llm, [sequence[:start]], TOKENS + 1)
        logits["ours"] += recorder.logits[i]
        for name, model in models.items():
            with torch.no_grad():
                logits[name] += model(given[None, :-1]).logits[0, start - 1 :].float()
    ours, eager, sdpa = (torch.stack(logits[name]) for name in ("ours", "eager", "sdpa"))
    allowed = (eager - sdpa).abs()
    assert (ours - sdpa).abs().mean() < allowed.mean()
    assert (ours - sdpa).abs().max() < allowed.max()


@pytest.mark.compiler
def test_the_last_layer_finishes_only_tokens_that_are_sampled_from(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    llm = make(directory, **{**CHUNKED, "max_num_batched_tokens": 64})
    first, *_, last = llm.engine.core.runner.model.layers
    finished: dict[Any, list[int]] = {first: [], last: []}
    for layer in (first, last):
        layer.register_forward_hook(lambda layer, _, out: finished[layer].append(len(out[0])))
    tokens(llm, PROMPTS[:2], 3)
    # The second prompt takes two steps, and the first one decodes beside its second half. The last
    # step, of one row, plays the tape that was recorded at the start and calls no layer.
    assert finished == {first: [64, 32, 2], last: [1, 2, 2]}


def with_rope(directory: Path, kind: str, **fields: Any) -> Path:
    """A Llama of 64 positions before scaling: prompts and answers go past them."""
    parameters = {"rope_type": kind, "rope_theta": 1e4, **ROPE[kind], **fields}
    original = 512 if kind == "llama3" else 64
    return write_checkpoint(
        "llama", directory, max_position_embeddings=original, rope_parameters=parameters
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in ROPE),
        ("yarn", {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("yarn", {"mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False}),
    ],
)
def test_rope_types_past_the_original_context(
    kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    directory = with_rope(tmp_path, kind, **fields)
    expected = generate(directory, PROMPTS, TOKENS)
    check_parity(directory, PROMPTS, expected)
    check_parity(directory, PROMPTS, expected, **CHUNKED)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_positions_stay_logical_when_entries_go(kind: str, tmp_path: Path) -> None:
    """After evictions, logits are those of dense attention over what is held, at its positions."""
    directory = with_rope(tmp_path, kind)
    policy = {"name": "streaming_llm", "budget": 24, "sinks": 4, "period": 8}
    recorder, (prompt,) = Recorder(make(directory, policy=policy)), random_prompts([60])
    (answer,) = tokens(recorder.llm, [prompt], TOKENS)
    events = recorder.records[0].events
    assert len(events) > 3
    dense = dense_pass(load_dense(directory), prompt + answer[:-1], events)
    expected = dense.logits[len(prompt) - 1 :]
    torch.testing.assert_close(torch.stack(recorder.logits[0]), expected, atol=1e-4, rtol=0.0)


def test_dynamic_rope_is_the_same_after_preemptions(tmp_path: Path) -> None:
    directory = with_rope(tmp_path, "dynamic")
    expected = generate(directory, PROMPTS, TOKENS)
    llm = check_parity(directory, PROMPTS, expected, num_gpu_blocks_override=14)
    assert llm.stats().preemptions_total > 0


def test_dynamic_rope_shares_only_what_any_prompt_would_compute(tmp_path: Path) -> None:
    """Blocks of prompts beyond the original context hold keys rotated for that length."""
    directory = with_rope(tmp_path, "dynamic")
    llm = make(directory)
    (text,) = random_prompts([100], seed=1)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

    def run(prompt: list[int]) -> tuple[list[int], int]:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        (expected,) = generate(directory, [prompt], 20)
        assert output.outputs[0].token_ids == expected.token_ids
        return expected.token_ids, output.num_cached_tokens

    assert run(text[:80])[1] == 0
    answer, cached = run(text[:60])  # the prompt before it was too long to share
    assert cached == 0
    assert run(text[:60] + answer)[1] == 0  # and this one is too long to take
    assert run(text[:60] + answer[:3])[1] == 48


def test_dynamic_rope_under_recomputed_queries(tmp_path: Path) -> None:
    """Kara's queries come from a second forward: it rotates them as the first one did."""
    directory = with_rope(tmp_path, "dynamic")
    kara = {
        "name": "kara",
        "window": 40,
        "buffer": 4,
        "chunk_budget": 2,
        "max_chunk": 4,
        "protect_prompt": False,
    }
    logged = {"query_dtype": "model"}  # recomputed queries are not rounded
    found = []
    for source in (logged, {"query_source": "recompute"}):
        llm = make(directory, policy={**kara, **source})
        found.append(tokens(llm, PROMPTS, 20))
        assert llm.stats().compactions_total > 0
    assert found[0] == found[1]


def test_policies_need_a_layer_that_sees_all_tokens(tmp_path: Path) -> None:
    directory = write_checkpoint("mistral", tmp_path, sliding_window=160)
    with pytest.raises(ConfigError, match=r"--policy: every layer .*sliding window .160 tokens."):
        make(directory, policy="kara")
    llm = make(directory)
    row = row_of(llm, "sliding window")
    assert row[1] == "160 tokens in 3 of 3 layers" and "policies" not in row[2]
    with pytest.raises(RequestError, match="sliding window") as refused:
        llm.generate([3, 4], SamplingParams(kv_policy="kara"), use_tqdm=False)
    assert refused.value.param == "kv_policy"
