"""What policies share that cut a whole row to a budget: how much stays, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvserve.engine.policies.base import (
    Policy,
    argument,
    exact_ratio,
    one_of,
    require,
)
from kvserve.scheduler.trigger import AtPrefillEnd, Budget, Trigger, WhenOver

DEFAULT_GAP = 128


class WindowVotes:
    """For policies whose newest ``window`` entries are kept, and score the others by their queries.

    ``query_reduce`` says how these are logged.
    """

    window: int
    query_reduce: str

    @property
    def protected(self) -> int:
        return self.window

    @property
    def num_queries(self) -> int:
        return self.window

    @property
    def query_reduction(self) -> str | None:
        return self.query_reduce


@dataclass(frozen=True)
class PromptPolicy(Policy):
    """``budget`` or ``ratio`` of a prompt's entries stay, cut once, when it is in."""

    budget: int | None = argument(
        None,
        "entries kept per head, the protected newest ones among them; give this or ratio",
        least=1,
        note="above the protected ones",
    )
    ratio: float | str | None = argument(
        None,
        "fraction of the prompt's entries that is kept (trigger prefill only)",
        note="above 0, at most 1",
    )

    needs: ClassVar[tuple[str, ...]] = ("budget", "ratio")
    nearest: ClassVar[bool] = False
    """A ratio is rounded to the nearest, not down."""

    @property
    def num_queries(self) -> int:
        """Newest queries that scores need."""
        return 0

    @property
    def least(self) -> int:
        """Smallest budget: the protected entries and a choice of one."""
        return self.protected + 1

    @property
    def trigger(self) -> Trigger:
        return AtPrefillEnd(self.entries, self.num_queries)

    @property
    def entries(self) -> Budget:
        """Entries kept of a prompt."""
        if self.ratio is None:
            return Budget(tokens=self.budget)
        ratio = exact_ratio(self.ratio, "ratio")
        return Budget(ratio=ratio, least=self.least, nearest=self.nearest)

    def check_budget(self, allowed: str) -> None:
        """Raise ``PolicyError`` unless the fields agree; ``allowed`` words the smallest budget."""
        if self.ratio is None:
            check_budget(self.budget, self.least, f"{allowed} (or give ratio)")
            return
        require(self.budget is None, "budget", self.budget, "left out where ratio is given")
        exact_ratio(self.ratio, "ratio")


@dataclass(frozen=True)
class BudgetedPolicy(PromptPolicy):
    """The same, or with trigger threshold whenever so many entries are held."""

    when: str = argument(
        "prefill",
        "prefill: once, when the prompt is in; threshold: whenever threshold entries are held",
        name="trigger",
        choices=("prefill", "threshold"),
    )
    threshold: int | None = argument(
        None,
        f"entries held when trigger threshold fires (default budget + {DEFAULT_GAP})",
        least=1,
        note="above budget",
    )
    protect_prompt: bool = argument(
        True, "trigger threshold: the prompt neither counts nor takes part"
    )

    @property
    def trigger(self) -> Trigger:
        if self.when == "prefill":
            return super().trigger
        assert self.budget is not None
        limit = threshold_or_default(self.threshold, self.budget)
        return WhenOver(limit, self.budget, self.num_queries, self.protect_prompt)

    def check_budget(self, allowed: str) -> None:
        one_of("trigger", self.when, ("prefill", "threshold"))
        one_of("protect_prompt", self.protect_prompt, (True, False))
        super().check_budget(allowed)
        if self.when == "prefill":
            fixed = self.threshold is None
            require(fixed, "threshold", self.threshold, "left out unless trigger is threshold")
        else:
            require(self.ratio is None, "ratio", self.ratio, "left out where trigger is threshold")
            assert self.budget is not None
            check_threshold(self.threshold, self.budget)


def check_budget(budget: int | None, least: int, allowed: str) -> None:
    """Check a number of entries; ``allowed`` words the bound."""
    ok = isinstance(budget, int) and not isinstance(budget, bool) and budget >= least
    require(ok, "budget", budget, f"an integer {allowed}")


def check_threshold(threshold: int | None, budget: int, gap: int = 1) -> None:
    """Check that an event has at least ``gap`` entries to evict."""
    if threshold is None:
        return
    ok = isinstance(threshold, int) and not isinstance(threshold, bool)
    allowed = f"an integer of at least {budget + gap} (budget + {gap})"
    require(ok and threshold >= budget + gap, "threshold", threshold, allowed)


def threshold_or_default(threshold: int | None, budget: int) -> int:
    """Entries held when an event is due."""
    return budget + DEFAULT_GAP if threshold is None else threshold
