"""What clients are offered for `kv_policy`: arguments that act, or why a policy cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.datasets.tasks import make_samples
from kvserve import LLM, SamplingParams
from kvserve.engine.core.request_policies import offered_args
from kvserve.engine.policies.registry import policy_names


def engine(**settings: Any) -> LLM:
    return LLM("kvserve/tiny", max_num_seqs=2, num_gpu_blocks_override=2000, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["model", "head"])
def test_what_is_offered_runs_and_compacts(layout: str) -> None:
    llm = engine(kv_layout=layout)
    offers = llm.engine.core.offers()
    assert [offer.name for offer in offers] == policy_names()
    (sample,) = make_samples("chain", 1, 0)
    taken = [offer for offer in offers if offer.refusal is None]
    params = [
        SamplingParams(max_tokens=400, ignore_eos=True, kv_policy={"name": each.name, **each.args})
        for each in taken
    ]
    asked = [[{"role": "user", "content": sample.turns[0]}] for _ in taken]
    for offer, output in zip(taken, llm.chat(asked, params), strict=True):
        events = output.kv_cache_details.compactions
        assert (events > 0) == (offer.name != "none"), offer
    refused = {offer.name for offer in offers if offer.refusal is not None}
    uneven = {"pyramidkv", "pyramidinfer", "dynamickv", "windowkv", "adakv", "spindlekv"}
    assert refused == (uneven if layout == "model" else {"spindlekv"})


def test_the_servers_own_policy_and_its_choice_of_others_count() -> None:
    args = {"window": 64, "buffer": 8}
    own = {"name": "kara", **args}
    offers = {each.name: each for each in engine(policy=own).engine.core.offers()}
    assert "--kv-layout head" in str(offers["adakv"].refusal)
    assert offers["kara"].args == args and offers["kara"].refusal is None
    found = engine(policy=own, allow_request_policy="none").engine.core.offers()
    assert {offer.name for offer in found if offer.refusal is None} == {"none", "kara"}


@pytest.mark.parametrize(("context", "size"), [(256, 64), (4096, 128), (10**6, 512)])
def test_sizes_follow_the_context(context: int, size: int) -> None:
    assert offered_args(["window", "buffer", "budget"], context)["window"] == size
    assert offered_args(["budget", "trigger"], context) == {"budget": size, "trigger": "threshold"}
    assert offered_args([], context) == {}


def test_the_bytes_of_a_token_follow_the_model_and_not_the_layout() -> None:
    layers, heads, head_dim, float32 = 4, 2, 32, 4
    expected = layers * heads * head_dim * 2 * float32
    for layout in ("model", "layer", "head"):
        assert engine(kv_layout=layout).engine.core.info.token_bytes == expected
