"""The model that ships: transformers' greedy tokens one for one, and its tasks solved."""

from __future__ import annotations

from bench.harness.datasets.tasks import grade, make_samples
from kvserve import LLM, SamplingParams
from kvserve.engine.models.hub import find_model
from tests.checkpoints import greedy

MODEL = "kvserve/tiny"


def test_greedy_equals_transformers() -> None:
    """In chunks of all sizes, with sequences that wait."""
    llm = LLM(MODEL, dtype="float32", max_num_batched_tokens=64, max_num_seqs=4)
    assert llm.tokenizer is not None
    tasks = "chain", "needle-512", "redundant-chain", "recall"
    turns = [make_samples(task, 1, seed=3)[0].turns[0] for task in tasks]
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": t}]) for t in turns]
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outputs] == greedy(find_model(MODEL), prompts, 120)


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
