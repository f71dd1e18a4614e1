"""TriAttention: keep the keys that queries usually point at (arXiv 2604.04921).

Before RoPE the queries of a head gather around a centre, which ``kvserve calibrate`` measures once
for each model. A key's score is the attention of a query at the centre, from the next 65,536 places
on (section 4): no query is logged or computed, and an event reads the keys once. The newest entries
are always kept, as in the released serving code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, exact_ratio, require
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import FUTURES, Observation
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.periodic import Rounds
from kvserve.scheduler.triggers.trigger import Trigger

_USUAL_BUDGET = 2048
_USUAL_RECENT = 128


@dataclass(frozen=True)
class TriAttention(Policy):
    """Hold ``budget`` entries, the prompt among them: the newest, and those queries point at.

    Use it for long generations of models whose queries are concentrated, as ``kvserve calibrate``
    says of a model.
    """

    name: ClassVar[str] = "triattention"
    cost: ClassVar[str] = (
        "No log, and nothing between events; an event reads the row's keys once. Statistics of the "
        "model's queries have to be measured once (kvserve calibrate)."
    )
    avoid: ClassVar[str] = (
        "Models whose queries point nowhere in particular; outputs that stay below budget; text "
        "that must quote its own earlier output exactly."
    )
    uses_centres: ClassVar[bool] = True
    protects: ClassVar[str] = "newest"

    budget: int | None = argument(
        None,
        f"entries kept per head, the prompt and the recent ones among them (default "
        f"{_USUAL_BUDGET}); give this or ratio",
        least=2,
        above="recent",
    )
    ratio: float | str | None = common.kept_ratio(
        None, "fraction of the generated tokens that is kept, in place of a budget"
    )
    period: int = argument(128, "entries above the budget when an event is due", least=1)
    recent: int | None = argument(
        None,
        f"newest entries, always kept (default {_USUAL_RECENT}, or half of budget where that is "
        "less)",
        least=0,
    )
    mode: str = argument(
        "per_layer_per_head",
        "which heads choose together: each KV head for itself; the heads of one index in all "
        "layers, by their mean (per_head); or all heads of all layers, by the best (union)",
        choices=("per_layer_per_head", "per_head", "union"),
    )
    aggregation: str = argument(
        "mean", "over the places that scores stand for: their mean or the best", choices=FUTURES
    )
    normalise: bool = argument(
        True, "scores of each query head have mean 0 and deviation 1 before heads are compared"
    )
    protect_prompt: bool = argument(
        True, "leave the prompt alone; otherwise it competes, from its end on"
    )
    stats: str | None = argument(
        None,
        "file that kvserve calibrate wrote (default: triattention.stats beside the model); "
        "requests use the server's",
    )
    remainder: str = common.remainder()
    rest_bits: float = common.rest_bits()

    def check(self) -> None:
        if self.ratio is None:
            return
        require(self.budget is None, "budget", self.budget, "left out where ratio is given")
        dropped = (1 - exact_ratio(self.ratio, "ratio")) * self.period
        allowed = f"small enough to drop an entry of every {self.period}"
        require(dropped >= 1, "ratio", self.ratio, allowed)

    def with_statistics(self, file: str | None) -> TriAttention:
        return replace(self, stats=file)

    @property
    def newest(self) -> int:
        """How many of the newest entries are always kept."""
        if self.recent is not None:
            return self.recent
        return _USUAL_RECENT if self.budget is None else min(_USUAL_RECENT, self.budget // 2)

    @property
    def event_trigger(self) -> Trigger:
        least = self.newest + 1
        if self.ratio is not None:
            budget = Budget(ratio=exact_ratio(self.ratio, "ratio"), least=least)
        else:
            budget = Budget(self.budget or _USUAL_BUDGET, least=least)
        return Rounds(budget, self.period, self.protect_prompt)

    @property
    def couples_heads(self) -> bool:  # type: ignore[override]
        return self.mode == "union"

    @property
    def couples_layers(self) -> bool:  # type: ignore[override]
        return self.mode != "per_layer_per_head"

    def score(self, obs: Observation) -> Tensor:
        """By the best query head of each KV head: float32 [E, L, Hkv, n - newest].

        With mode union the ``n`` best of all heads' best scores are those of the union of each
        head's ``n`` best, which the released code ranks by the same.
        """
        length = obs.keys.shape[-2] - self.newest
        scores = obs.by_centres(self.aggregation, length, normalise=self.normalise)
        if self.mode == "per_layer_per_head":
            return scores
        if self.mode == "per_head":
            return scores.mean(dim=1, keepdim=True).expand_as(scores)
        scores = obs.all_heads(scores)
        return scores.amax(dim=(1, 2), keepdim=True).expand_as(scores)
