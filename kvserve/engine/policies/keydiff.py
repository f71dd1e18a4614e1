"""KeyDiff: keep the keys that are unlike the others (arXiv 2504.15364).

A key far from the mean direction of its head tends to draw attention, so keys alone say what to
keep (section 3). With mode block the prompt is cut while it is read, as in the paper: memory stays
bounded, and later blocks never see what was dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import argument, require
from kvserve.engine.policies.budgeted import THRESHOLD, BudgetedPolicy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import Bounded


@dataclass(frozen=True)
class KeyDiff(BudgetedPolicy):
    """Keep the prompt's most distinctive keys; no queries are needed or logged.

    Use mode block for prompts that do not fit the pool: they never hold more than budget + block
    entries. With trigger threshold generated text is bounded too.
    """

    name: ClassVar[str] = "keydiff"
    cost: ClassVar[str] = (
        "No log; one pass over the row's keys per event. With mode once the prompt's blocks until "
        "its end, with mode block never more than budget + block entries."
    )
    avoid: ClassVar[str] = (
        "Details whose keys look like all others; prompts not much longer than budget; with "
        "trigger prefill, long outputs."
    )
    ranks_entries: ClassVar[bool] = True
    protects: ClassVar[str] = "recent"

    protect_prompt: bool = argument(
        False, "the prompt neither counts nor takes part", only_if=THRESHOLD
    )
    mode: str = argument(
        "once",
        "once: the whole prompt at its end; block: while it is read",
        choices=("once", "block"),
    )
    block: int = argument(128, "prompt tokens between evictions", least=1, only_if=("mode block",))
    recent: int = argument(0, "newest entries that are always kept", least=0)

    def check(self) -> None:
        super().check()
        if self.mode == "block":
            require(self.ratio is None, "ratio", self.ratio, "left out where mode is block")
            apart = self.protect_prompt is False
            require(apart, "protect_prompt", self.protect_prompt, "False where mode is block")

    @property
    def event_trigger(self) -> Trigger:
        if self.mode == "once":
            return super().event_trigger
        assert self.budget is not None
        limit = common.limit(self.budget, self.threshold) if self.trigger == "threshold" else None
        return Bounded(self.budget, limit, 0, self.block, self.recent)

    def score(self, obs: Observation) -> Tensor:
        """Minus each key's cosine with the anchor: float32 [E, L, Hkv, n - recent]."""
        similarity = obs.anchor_similarity()
        return obs.there(-similarity[..., : similarity.shape[-1] - self.recent])
