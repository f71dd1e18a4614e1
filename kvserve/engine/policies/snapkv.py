"""SnapKV: keep what the end of the prompt attends to (arXiv 2404.14469).

The last ``window`` queries vote for earlier entries; votes are smoothed along the text, so that a
chosen token brings its neighbours (section 4, Listing 1). As kvserve runs it: one choice per KV
head, the votes of its query heads reduced first, so that no key is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import argument, integers, odd, one_of
from kvserve.engine.policies.budgeted import BudgetedPolicy, WindowVotes
from kvserve.engine.policies.scoring import (
    GQA_REDUCTIONS,
    POOLINGS,
    Observation,
    pool_scores,
)
from kvserve.engine.policies.selection import best_and_newest


@dataclass(frozen=True)
class SnapKV(WindowVotes, BudgetedPolicy):
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

    window: int = argument(32, "newest entries: always kept, and their queries vote", least=1)
    kernel_size: int = argument(5, "entries over which votes are pooled", least=1, note="odd")
    pooling: str = argument("avg", "how votes are pooled", choices=POOLINGS)
    gqa_reduce: str | None = argument(
        None,
        "over the query heads of a KV head (default: mean; with scope past, where it reduces "
        "logits, max)",
        choices=GQA_REDUCTIONS,
    )
    scope: str = argument(
        "causal",
        "softmax over all that a query sees (causal), or over entries before the window "
        "alone (past, as in R-KV's decode-time SnapKV)",
        choices=("causal", "past"),
    )
    query_reduce: str = argument(
        "heads",
        "which queries are logged: all heads, or the mean over each GQA group",
        choices=("heads", "group_mean"),
    )

    def __post_init__(self) -> None:
        integers(self, window=1)
        odd("kernel_size", self.kernel_size)
        one_of("pooling", self.pooling, POOLINGS)
        one_of("gqa_reduce", self.gqa_reduce, (None, *GQA_REDUCTIONS))
        one_of("scope", self.scope, ("causal", "past"))
        one_of("query_reduce", self.query_reduce, ("heads", "group_mean"))
        self.check_budget(f"above window ({self.window})")

    def score(self, obs: Observation) -> Tensor:
        """Pooled votes for the entries before the window: float32 [E, L, Hkv, n - window]."""
        if self.scope == "past":
            votes = obs.past(self.gqa_reduce or "max")
        else:
            votes = obs.causal(self.gqa_reduce or "mean")
        return obs.there(pool_scores(votes, self.kernel_size, self.pooling))

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The best ``keep - window`` and the window: [E, L, Hkv, keep]."""
        return best_and_newest(scores, length, keep)
