"""The model that ships: transformers' greedy tokens one for one, and its tasks solved."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.datasets.tasks import grade, make_samples
from kvserve import LLM, SamplingParams
from kvserve.engine.models.hub import find_model
from tests.checkpoints import greedy
from tests.thinning import slow

MODEL = "kvserve/tiny"
TASKS = ["chain", "needle-512", "redundant-chain", "recall"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)


@pytest.mark.parametrize(
    "settings",
    [*slow({}, {"num_gpu_blocks_override": 70}), {"max_num_batched_tokens": 64, "max_num_seqs": 4}],
    ids=["ample", "small-pool", "chunks"],
)
def test_greedy_equals_transformers(settings: dict[str, Any]) -> None:
    llm = LLM(MODEL, dtype="float32", **settings)
    assert llm.tokenizer is not None
    turns = [sample.turns[0] for task in TASKS for sample in make_samples(task, 2, seed=3)]
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in turns]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == greedy(find_model(MODEL), prompts, 120)


def test_it_solves_chains_and_kara_leaves_its_mark() -> None:
    llm = LLM(MODEL, policy={"name": "kara", "window": 128, "buffer": 16})
    samples = make_samples("chain", 12, seed=7)
    talks = [[{"role": "user", "content": sample.turns[0]}] for sample in samples]
    exact = {}
    for policy in ("none", None):
        params = SamplingParams(temperature=0.0, max_tokens=400, kv_policy=policy)
        outputs = llm.chat(talks, params, use_tqdm=False)
        right = [grade(s, [o.outputs[0].text]).exact for s, o in zip(samples, outputs, strict=True)]
        exact[policy] = sum(right)
        compacted = [output.kv_cache_details.compactions > 0 for output in outputs]
        assert all(compacted) if policy is None else not any(compacted)
    assert exact["none"] >= 11
    assert exact[None] <= exact["none"]
