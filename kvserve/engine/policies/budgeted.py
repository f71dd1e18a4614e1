"""The base of a policy that scores and cuts a whole row to a budget: how much stays, and when.

``class MyPolicy(BudgetedPolicy)`` with a method ``score`` is a whole policy: the best entries stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.arguments import argument, exact_ratio, require
from kvserve.fields import number_wanted
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd, WhenOver

THRESHOLD = ("trigger threshold",)
"""When arguments count that say what is cut after the prompt."""


@dataclass(frozen=True)
class PromptPolicy(Policy):
    """Cuts a prompt once, at its end: ``budget`` entries stay, or ``ratio`` of them."""

    budget: int | None = argument(
        None,
        "entries kept per head, protected newest ones among them; give this or ratio",
        least=1,
        note="above the protected ones, if any",
    )
    ratio: float | str | None = common.kept_ratio(
        None, "fraction of the prompt's entries that is kept (trigger prefill only)"
    )

    remainder: str = common.remainder()
    rest_bits: float = common.rest_bits()

    needs: ClassVar[tuple[str, ...]] = ("budget", "ratio")
    nearest: ClassVar[bool] = False
    """Whether a ratio is rounded to the nearest count instead of down."""

    @property
    def num_queries(self) -> int:
        """Newest queries that scores need: those of the protected entries, if any."""
        return self.protected if self.query_reduction else 0

    @property
    def least(self) -> int:
        """Smallest budget: the protected entries and one more."""
        return self.protected + 1

    @property
    def least_in_words(self) -> str:
        """The same in words, for the error that refuses a smaller budget."""
        if self.protects:
            return f"above {self.protects} ({self.protected})"
        return f"of at least {self.least}"

    @property
    def entries(self) -> Budget:
        """Entries kept of a prompt."""
        if self.ratio is None:
            return Budget(tokens=self.budget)
        ratio = exact_ratio(self.ratio, "ratio")
        return Budget(ratio=ratio, least=self.least, nearest=self.nearest)

    @property
    def event_trigger(self) -> Trigger:
        return AtPrefillEnd(self.entries, self.num_queries, self.protected)

    def check(self) -> None:
        if self.ratio is None:
            enough = number_wanted(self.budget, int, self.least) is None
            allowed = f"an integer {self.least_in_words} (or give ratio)"
            require(enough, "budget", self.budget, allowed)
        else:
            require(self.budget is None, "budget", self.budget, "left out where ratio is given")


@dataclass(frozen=True)
class BudgetedPolicy(PromptPolicy):
    """As ``PromptPolicy``; with trigger threshold, cuts whenever ``threshold`` entries are held."""

    trigger: str = argument(
        "prefill",
        "prefill: once, when the prompt is in; threshold: whenever threshold entries are held",
        choices=("prefill", "threshold"),
    )
    threshold: int | None = common.threshold("entries held when an event is due", only_if=THRESHOLD)
    protect_prompt: bool = argument(
        True, "the prompt neither counts nor takes part", only_if=THRESHOLD
    )

    @property
    def event_trigger(self) -> Trigger:
        if self.trigger == "prefill":
            return super().event_trigger
        assert self.budget is not None
        limit = common.limit(self.budget, self.threshold)
        bounds = limit, self.budget, self.num_queries, self.protect_prompt
        return WhenOver(*bounds, self.protected)

    def check(self) -> None:
        super().check()
        if self.trigger == "threshold":
            require(self.ratio is None, "ratio", self.ratio, "left out where trigger is threshold")
