"""PyramidInfer: worked lengths, a naive loop over layers, what an unchunked prompt rules out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.inspect import inspect
from kvserve.engine.policies.pyramidinfer import PyramidInfer
from kvserve.engine.policies.scoring import Observation
from kvserve.log import RequestError
from kvserve.scheduler.triggers.pruning import Taper
from tests.checkpoints import random_prompts
from tests.engine.dense_reference import DensePass, dense_pass, load_dense

SPEC: dict[str, Any] = {
    "name": "pyramidinfer", "min_context": 6, "decay": 0.2, "recent_ratio": 0.15, "period": 8,
    "decode_decay": 0.3, "distance_weight": 3, "sinks": 2,
}  # fmt: skip
POLICY = PyramidInfer(**{key: value for key, value in SPEC.items() if key != "name"})
PROMPT, MORE = random_prompts([70, 45], seed=2)
RECENT = int(70 * 0.15) + 1


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    settings = {"block_size": 4, "max_num_seqs": 8, **settings}
    return LLM(str(directory), policy=policy, dtype="float32", skip_tokenizer_init=True, **settings)


def test_lengths_by_layer() -> None:
    default = PyramidInfer().event_trigger
    assert default.prompt_lengths(100, 4) == [100, 100, 98, 94]
    long = default.prompt_lengths(1000, 32)
    assert (long[0], long[-1], np.mean(long)) == (1000, 373, 762.75)
    assert default.prompt_lengths(50, 4) == [50] * 4 and not default.prunes(np.array(50))
    every_second = PyramidInfer(interval=2).event_trigger.prompt_lengths(1000, 32)
    assert every_second[0] == every_second[2] > every_second[3] == every_second[4]
    assert long[-1] < every_second[-1]


def test_shares_fall_with_depth() -> None:
    shares = [Taper(0.9).of(layer, 4) for layer in range(4)]
    assert np.allclose(shares, [1, 0.98536, 0.95, 0.91464], atol=1e-5)
    assert [Taper(0.6, "linear").of(layer, 4) for layer in range(4)] == [1, 0.9, 0.8, 0.7]
    assert PyramidInfer().event_trigger.kept_of_period(4) == [14, 12, 7, 3]
    assert PyramidInfer(decode_ratio=0).event_trigger.kept_of_period(2) == [1, 1]


def test_the_worked_choice() -> None:
    """Two recent tokens give a context of four [.5 .1 .2 .1] and [.4 .05 .1 .3]."""
    given = torch.tensor([[0.5, 0.1, 0.2, 0.1, 0.1, 1], [0.4, 0.05, 0.1, 0.3, 0.1, 0.05]])
    obs = Observation(torch.eye(2)[None, None, None], given.log().T[None, None, None], 1.0)
    policy = PyramidInfer(sinks=1)
    expected = torch.tensor([0.49, 0.08, 0.16, 0.23])
    torch.testing.assert_close(policy.score(obs)[0, 0, 0], expected)
    assert policy.survivors(obs, 4).tolist() == [0, 3, 4, 5]


def weighted_means(dense: DensePass, layer: int, held: list[int], queries: range) -> list[float]:
    """What ``queries`` give each position of ``held``, query by query and head by head."""
    scale, group = dense.keys.shape[-1] ** -0.5, dense.queries.shape[1] // dense.keys.shape[1]
    total = [0.0] * len(held)
    for number, position in enumerate(queries):
        weight = 1 + number / (len(queries) - 1) * (POLICY.distance_weight - 1)
        seen = [j for j in held if j <= position]
        for head, query in enumerate(dense.queries[layer, :, position]):
            keys: Tensor = dense.keys[layer, head // group, seen]
            for at, p in enumerate(torch.softmax(keys @ query * scale, dim=-1).tolist()):
                total[at] += weight * p / len(queries) / dense.queries.shape[1]
    return total


def top(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:count])


def test_kept_sets_equal_a_naive_loop(llama_dir: Path) -> None:
    """While the prompt is computed, and every eight tokens after it."""
    found = inspect(make_llm(llama_dir, SPEC), PROMPT, MORE)
    tokens = PROMPT + MORE
    assert [event.seen for event in found.events] == [70, *range(78, len(tokens) + 1, 8)]
    dense = dense_pass(load_dense(llama_dir), tokens, found.events, pruned=True)
    layers = len(dense.keys)
    lengths = POLICY.event_trigger.prompt_lengths(70, layers)
    assert lengths[0] == 70 > lengths[-1]
    held = [list(range(70))]
    for layer in range(1, layers):
        below, context = held[-1], held[-1][:-RECENT]
        scores = weighted_means(dense, layer - 1, below, range(70 - RECENT, 70))[: len(context)]
        scores[: POLICY.sinks] = [float("inf")] * POLICY.sinks
        kept = top(scores, lengths[layer] - RECENT)
        held.append([context[j] for j in kept] + below[-RECENT:])
    ahead = 70 - RECENT
    for number, event in enumerate(found.events):
        if number:
            for layer in range(layers):
                now = held[layer] + list(range(event.seen - 8, event.seen))
                scores = weighted_means(dense, layer, now, range(event.seen - RECENT, event.seen))
                at = now.index(ahead)
                kept = top(scores[at : at + 8], POLICY.event_trigger.kept_of_period(layers)[layer])
                held[layer] = now[:at] + [now[at + j] for j in kept] + now[at + 8 :]
            ahead += 8
        for layer, expected in enumerate(held):
            for head in event.held[layer]:
                assert head[head >= 0].tolist() == expected, (number, layer)


def test_what_is_not_pruned_is_computed_as_ever(llama_dir: Path) -> None:
    """Bit for bit, in chunks, and with prefix hits."""
    roomy = {**SPEC, "min_context": 70 - RECENT, "period": 50}
    params = SamplingParams(temperature=0.0, max_tokens=45, ignore_eos=True, logprobs=3)
    seen = []
    for policy in ("none", roomy):
        llm = make_llm(llama_dir, policy, kv_layout="layer", max_num_batched_tokens=16)
        llm.generate([PROMPT], params, use_tqdm=False)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert output.kv_cache_details.compactions == 0 and output.num_cached_tokens
        seen.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert seen[0] == seen[1]


def test_a_pruned_prompt_takes_nothing_from_the_prefix_cache_and_gives_nothing(
    llama_dir: Path,
) -> None:
    llm = make_llm(llama_dir, SPEC)
    for policy, cached in ((None, 0), ("none", 0), (None, 0), ("none", 68)):
        params = SamplingParams(max_tokens=2, ignore_eos=True, kv_policy=policy)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        assert output.num_cached_tokens == cached
        assert output.kv_cache_details.compactions == (policy is None)
    stats = llm.stats()
    (counts,) = stats.compaction_counts
    assert counts.events == stats.compactions_total == 2
    assert counts.blocks_released == stats.blocks_released_total > 0


def test_what_chunks_would_make_undefined_is_refused(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, SPEC, max_num_batched_tokens=69)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(RequestError, match="70 tokens and a step takes 69; raise --max-num-batch"):
        llm.generate([PROMPT], params, use_tqdm=False)
    llm.generate([PROMPT[:69]], params, use_tqdm=False)
    llm.generate([PROMPT], SamplingParams(max_tokens=2, kv_policy="none"), use_tqdm=False)
    with pytest.raises(RequestError, match='before its end; send "kv_policy": "none"'):
        llm.generate([PROMPT[:60]], SamplingParams(prompt_logprobs=1), use_tqdm=False)


def test_a_prompt_of_a_whole_step_gets_its_turn(llama_dir: Path) -> None:
    """It cannot share a step with decodes, and those behind it do not overtake it."""
    llm = make_llm(llama_dir, "none", kv_layout="layer", max_num_batched_tokens=70)
    prompts = [MORE, PROMPT, MORE]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, kv_policy=policy)
        for policy in ("none", SPEC, "none")
    ]
    together = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], one, use_tqdm=False)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
