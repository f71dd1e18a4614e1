"""The model that ships: transformers' greedy tokens one for one, and its tasks solved."""

from __future__ import annotations

from bench.harness.datasets.tasks import grade, make_samples
from kvserve import LLM, SamplingParams

MODEL = "kvserve/tiny"


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
