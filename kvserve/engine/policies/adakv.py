"""Ada-KV: more entries for the heads that need them (arXiv 2407.11550).

The heads of a layer compete for its budget: a head gets as many places as it has among the layer's
best scores, mixed with an equal share as a safeguard (Algorithms 1 and 2). Scores are another
policy's; with those of ``pyramidkv`` layers differ too (Ada-Pyramid). Rounding follows the authors'
code. As kvserve runs it, heads are KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import (
    Policy,
    PolicyError,
    Selection,
    argument,
    field_names,
    require,
)
from kvserve.engine.policies.budgeted import THRESHOLD, BudgetedPolicy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.arguments import like
from kvserve.engine.policies.parts.budgets import layers, share_out
from kvserve.engine.policies.pyramidkv import PyramidKV
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import ranks, uneven_best_and_newest
from kvserve.engine.policies.snapkv import SnapKV
from kvserve.scheduler.layout import Granularity

_AS_RELEASED = {"kernel_size": 7, "pooling": "max"}
_PASSED_ON = ("window", "kernel_size", "pooling", "gqa_reduce")
_WHEN = ("budget", "ratio", "trigger", "threshold", "protect_prompt", "mode", "block", "remainder")
_SHARES, _MIXES = ("alpha below 1",), ("alpha above 0", "alpha below 1")


def _scorers(name: str) -> Any:
    """An argument that is passed on to the scorer, as SnapKV declares it."""
    help = f"the scorer's {name} (default: its own)"
    return like(SnapKV, name, default=None, help=help, only_if=())


@dataclass(frozen=True)
class AdaKV(BudgetedPolicy):
    """Keep a prompt's best entries by another policy's scores, more of them in heads whose scores
    stand out; with trigger threshold, bound what a long generation holds.

    ``budget`` is the mean over heads. As released, rounding may keep some entries more or less.
    With trigger threshold rounding never keeps more. A head that has fewer entries than its share
    keeps them all, and the rest of its share goes to no other head, so the mean may be less.
    """

    name: ClassVar[str] = "adakv"
    granularity: ClassVar[Granularity] = Granularity.HEAD
    cuts_again: ClassVar[bool] = True
    couples_heads: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "As its scorer, and a block table per layer and head, whose last blocks are each half "
        "empty on average."
    )
    avoid: ClassVar[str] = (
        "Large blocks and small budgets, where half empty blocks eat what is saved; what its "
        "scorer is not for."
    )

    threshold: int | None = common.threshold(
        "mean entries held when an event is due", only_if=THRESHOLD
    )
    scorer: str | Mapping[str, Any] = argument(
        "snapkv",
        'a policy that ranks entries, by name or as {"name": ..., fields}; snapkv by its bare '
        "name pools as the authors do (max over 7)",
        hashed=False,
    )
    window: int | None = _scorers("window")
    kernel_size: int | None = _scorers("kernel_size")
    pooling: str | None = _scorers("pooling")
    gqa_reduce: str | None = _scorers("gqa_reduce")
    alpha: float = argument(
        0.2, "share of the budget that all heads get alike: 0 fully adaptive, 1 uniform", least=0,
        most=1,
    )  # fmt: skip
    floor: str = argument(
        "mix",
        "mix: counts are mixed with the equal share; hard: each head keeps its own best alpha of "
        "it, and all compete for the rest",
        choices=("mix", "hard"),
        only_if=_MIXES,
    )
    normalize: bool = argument(
        False,
        "weigh a head's scores, in the competition, by the share of its mass that its best budget "
        "entries hold (scorers snapkv and pyramidkv)",
        only_if=_SHARES,
    )
    exact_total: bool = argument(
        False,
        "round so that the heads of a layer add up to its budget",
        only_if=("trigger prefill", "floor mix", *_MIXES),
    )

    def check(self) -> None:
        super().check()
        scorer = self.scores_by
        masses = not self.normalize or isinstance(scorer, SnapKV)
        require(masses, "normalize", self.normalize, "False unless the scorer gives probabilities")

    @cached_property
    def scores_by(self) -> Policy:
        """The scorer, made with this policy's budget."""
        spec = self._scorer_spec()
        with _naming("scorer"):
            scorer = policy_class(spec.get("name"))
            if not scorer.ranks_entries:
                ranking = [name for name in policy_names() if policy_class(name).ranks_entries]
                raise PolicyError(
                    f"{spec['name']} does not rank single entries; {', '.join(ranking)} do"
                )
            if "trigger" in field_names(scorer):  # on which others of its arguments depend
                spec["trigger"] = self.trigger
            return make_policy(spec, _AS_RELEASED if self.scorer == "snapkv" else {})

    def _scorer_spec(self) -> dict[str, Any]:
        ok = isinstance(self.scorer, str | Mapping)
        require(ok, "scorer", self.scorer, 'a policy\'s name or {"name": ..., fields}')
        given = {"name": self.scorer} if isinstance(self.scorer, str) else dict(self.scorer)
        for field in _WHEN:
            require(field not in given, "scorer", self.scorer, f"left without {field}")
        passed = {field: getattr(self, field) for field in _PASSED_ON}
        passed = {field: value for field, value in passed.items() if value is not None}
        for field, value in passed.items():
            require(field not in given, field, value, "left out where scorer has it")
        amount = {"ratio": self.ratio} if self.budget is None else {"budget": self.budget}
        return {**given, **passed, **amount}

    @property
    def protected(self) -> int:
        return self.scores_by.protected

    @property
    def least_in_words(self) -> str:
        scorer = self.scores_by
        return f"above the {scorer.protected} that {scorer.name} protects"

    def check_bounds(self, max_model_len: int) -> None:
        super().check_bounds(max_model_len)
        with _naming("scorer"):
            self.scores_by.check_bounds(max_model_len)

    @property
    def num_queries(self) -> int:
        return self.scores_by.event_trigger.num_queries

    @property
    def query_reduction(self) -> str | None:
        return self.scores_by.query_reduction

    @property
    def logged_dtype(self) -> str:
        return self.scores_by.logged_dtype

    @property
    def uses_values(self) -> bool:  # type: ignore[override]
        return self.scores_by.uses_values

    def score(self, obs: Observation) -> Tensor:
        """The scorer's scores, -inf where a shorter lane has no entry."""
        return obs.all_heads(obs.there(self.scores_by.score(obs)))

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """Each head keeps its protected entries, and the best of the others up to its budget."""
        base, share = self._layer_budgets(scores, length, keep), Fraction(str(self.alpha))
        competing = self._weighted(scores, base) if self.normalize else scores
        if self.floor == "hard":
            own = base * share.numerator // share.denominator
            competing = competing.masked_fill(ranks(scores) < own[..., None], torch.inf)
        rank = ranks(competing.flatten(-2)).view(scores.shape)
        counts = (rank < (base * scores.shape[-2])[..., None]).sum(dim=-1)
        if self.floor == "mix":
            exact = self.exact_total or self.trigger == "threshold"
            counts = share_out(counts, base, share, exact)
        counts = counts.minimum((scores > -torch.inf).sum(dim=-1)) + length - scores.shape[-1]
        return Selection(uneven_best_and_newest(scores, length, counts), counts)

    def _layer_budgets(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """Mean budget per head of each layer, without the protected entries: int64 [L, 1]."""
        num_layers, scorer = scores.shape[1], self.scores_by
        budgets = [keep - self.protected] * num_layers
        if isinstance(scorer, PyramidKV):
            budgets = scorer.layer_budgets(num_layers, length, keep, self.trigger)
        return layers(budgets, scores)

    def _weighted(self, scores: Tensor, base: Tensor) -> Tensor:
        """Each head's scores times the share of its mass that its best ``base`` entries hold."""
        mass = scores.clamp(min=0)  # -inf where no entry is
        best = mass.masked_fill(ranks(scores) >= base[..., None], 0).sum(dim=-1, keepdim=True)
        weight = best / mass.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
        return torch.where(scores > -torch.inf, mass * weight, scores)


@contextmanager
def _naming(argument: str) -> Iterator[None]:
    """Raise a scorer's error as this policy's: of an argument both have, else of ``argument``."""
    try:
        yield
    except PolicyError as error:
        own = error.argument in field_names(AdaKV)
        raise PolicyError(f"{argument}: {error}", error.argument if own else argument) from None
