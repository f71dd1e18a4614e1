"""SnapKV: keep what the end of the prompt attends to (arXiv 2404.14469).

The last ``window`` queries vote for earlier entries; votes are smoothed along the text, so that a
chosen token brings its neighbours (section 4, Listing 1). As kvserve runs it: one choice per KV
head, the votes of its query heads reduced first, so that no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import argument
from kvserve.engine.policies.budgeted import BudgetedPolicy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import GQA_REDUCTIONS, Observation, pool_scores


@dataclass(frozen=True)
class SnapKV(BudgetedPolicy):
    """Keep the prompt's entries that its last tokens attend to; with trigger threshold, bound
    what a long generation holds.

    Use it for long prompts whose question stands at their end. A ratio is rounded down and leaves
    the window and one more entry at least. Prompts not longer than the budget stay as they are.
    """

    name: ClassVar[str] = "snapkv"
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; one event that scores window "
        "x prompt pairs per head, and later the same over threshold entries."
    )
    avoid: ClassVar[str] = (
        "Several questions about one prompt, where only the first one votes; prompts not much "
        "longer than budget; with trigger prefill, long outputs."
    )
    ranks_entries: ClassVar[bool] = True
    protects: ClassVar[str] = "window"

    window: int = common.window(32)
    kernel_size: int = common.kernel_size(5)
    pooling: str = common.pooling("avg")
    gqa_reduce: str | None = common.gqa_reduce(
        None, GQA_REDUCTIONS, " (default: mean; with scope past, where it reduces logits, max)"
    )
    scope: str = argument(
        "causal",
        "softmax over all that a query sees (causal), or over entries before the window "
        "alone (past, as in R-KV's decode-time SnapKV)",
        choices=("causal", "past"),
    )
    query_reduce: str = common.query_reduce()
    query_dtype: str = common.query_dtype()
    attention: str = common.attention("window", "what scope says")

    def score(self, obs: Observation) -> Tensor:
        """Pooled votes for the entries before the window: float32 [E, L, Hkv, n - window]."""
        absolute = self.attention == "absolute"
        if self.scope == "past":
            votes = obs.past(self.gqa_reduce or "max", absolute=absolute)
        else:
            votes = obs.causal(self.gqa_reduce or "mean", absolute=absolute)
        return obs.there(pool_scores(votes, self.kernel_size, self.pooling))
