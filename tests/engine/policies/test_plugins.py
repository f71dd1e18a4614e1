"""Policies from outside: what a plug-in may be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.policies.base import PolicyError, argument
from kvserve.engine.policies.budgeted import BudgetedPolicy
from kvserve.engine.policies.registry import describe_policies, make_policy
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd, WhenOver
from tests.checkpoints import write_checkpoint
from tests.engine.policies.one_row import choose, observe, plug_ins


@dataclass(frozen=True)
class SmallKeys(BudgetedPolicy):
    """Keep the keys of the smallest norm.

    All that a scorer has to say.
    """

    name: ClassVar[str] = "small_keys"
    ranks_entries: ClassVar[bool] = True

    def score(self, obs: Observation) -> Tensor:
        return -obs.keys.float().norm(dim=-1)


@dataclass(frozen=True)
class LargeValues(BudgetedPolicy):
    """Keep the values of the largest norm."""

    name: ClassVar[str] = "large_values"
    ranks_entries: ClassVar[bool] = True
    uses_values: ClassVar[bool] = True

    def score(self, obs: Observation) -> Tensor:
        assert obs.values is not None
        return obs.values.float().norm(dim=-1)


@dataclass(frozen=True)
class Votes(BudgetedPolicy):
    """Scores by the newest queries."""

    name: ClassVar[str] = "votes"
    protects: ClassVar[str] = "window"

    window: int = argument(4, "newest entries", least=1)
    query_reduce: str = argument("heads", "logged", choices=("heads", "group_mean"))

    def score(self, obs: Observation) -> Tensor:
        return obs.causal("mean")


@pytest.fixture(autouse=True)
def own_plug_ins() -> Iterator[None]:
    with plug_ins(SmallKeys, LargeValues, Votes):
        yield


def test_a_scorer_is_a_whole_policy() -> None:
    """Worked out by hand: norms 3, 1, 4, 2, 0; three stay, as they stood."""
    keys = torch.tensor([[[3.0], [1.0], [4.0], [2.0], [0.0]]])
    obs = observe(torch.zeros(1, 0, 1), keys)
    assert choose(make_policy({"name": "small_keys", "budget": 3}), obs, 3) == [[1, 3, 4]]
    often = make_policy({"name": "small_keys", "budget": 3, "trigger": "threshold"})
    assert often.event_trigger == WhenOver(131, 3, 0, protect_prompt=True)
    half = make_policy({"name": "small_keys", "ratio": 0.5}).event_trigger
    assert isinstance(half, AtPrefillEnd) and half.num_queries == 0
    with pytest.raises(PolicyError, match="threshold must be an integer above budget"):
        make_policy({"name": "small_keys", "budget": 3, "trigger": "threshold", "threshold": 3})


def test_it_is_described_and_offered_to_adakv() -> None:
    (described,) = [p for p in describe_policies() if p["name"] == "small_keys"]
    assert described["summary"] == "Keep the keys of the smallest norm."
    assert "budget" in described["schema"]["properties"]
    ada = make_policy({"name": "adakv", "budget": 8, "scorer": "small_keys"})
    keys = torch.randn(1, 2, 2, 9, 4)
    missing = torch.arange(9) < torch.tensor([[0, 3], [1, 0]])[..., None]
    scores = ada.score(Observation(keys[..., :0, :], keys, 1.0, missing=missing[None]))
    assert (scores[0][missing] == -torch.inf).all() and scores[0][~missing].isfinite().all()
    with pytest.raises(PolicyError, match="pyramidkv, small_keys, large_values do"):
        make_policy({"name": "adakv", "budget": 8, "scorer": "h2o"})


def test_a_scorer_of_values_gets_them_from_adakv_too(tmp_path: Path) -> None:
    """The largest values stay; a policy that declares nothing gets none."""
    checkpoint = write_checkpoint("llama", tmp_path)
    llm = LLM(str(checkpoint), skip_tokenizer_init=True, kv_layout="head", kv_cache_memory=2**24)
    prompt, seen = [list(range(5, 45))], []
    score = LargeValues.score

    def noted(policy: LargeValues, obs: Observation) -> Tensor:
        seen.append(obs)
        return score(policy, obs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LargeValues, "score", noted)
        for spec in ({"name": "large_values"}, {"name": "adakv", "scorer": "large_values"}):
            params = SamplingParams(max_tokens=2, kv_policy={**spec, "budget": 16})
            (answer,) = llm.generate(prompt, params)
            assert answer.kv_cache_details.evicted_tokens == 24
    assert len(seen) == 2
    assert all(obs.values is not None and obs.values.shape == obs.keys.shape for obs in seen)


def test_what_a_policy_protects_are_the_queries_that_it_needs() -> None:
    votes: Any = make_policy({"name": "votes", "budget": 9})
    assert (votes.protected, votes.num_queries, votes.query_reduction) == (4, 4, "heads")
    assert votes.event_trigger.num_queries == 4
    with pytest.raises(PolicyError, match=r"above window \(4\)"):
        make_policy({"name": "votes", "budget": 4})
