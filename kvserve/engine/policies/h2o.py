"""H2O: heavy hitters and the newest entries (arXiv 2306.14048).

An entry's score is all the attention it has received so far, from every query that could see it
(section 4). Once the budget is full, each new entry evicts the one with the lowest score; the
newest ``recent`` are safe. As kvserve runs it: the mass of a KV head is the sum over its query
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import best_and_newest
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import EveryStep


@dataclass(frozen=True)
class H2O(Policy):
    """Hold ``budget`` entries: the newest ones, and those that received most attention.

    Once that many are held, each new entry evicts the one that received least.
    """

    name: ClassVar[str] = "h2o"
    cost: ClassVar[str] = (
        "An event at every decode step, which moves a part of the row; until the first event all "
        "queries are logged, twice the keys and values at four query heads per KV head."
    )
    avoid: ClassVar[str] = (
        "Serving: it is here to compare with. Prompts that share a beginning, since it takes no "
        "prefix cache hits."
    )

    needs: ClassVar[tuple[str, ...]] = ("budget",)

    budget: int | None = common.required_budget("entries kept per head, the recent ones among them")
    recent: int | None = argument(
        None,
        "newest entries, always kept (default: half of budget, rounded up)",
        least=0,
        at_most="budget",
    )
    decode_update: bool = argument(
        True, "go on evicting while generating; off: cut the prompt once, at its end"
    )
    remainder: str = common.remainder()
    rest_bits: float = common.rest_bits()

    @property
    def entries(self) -> int:
        assert self.budget is not None
        return self.budget

    @property
    def newest(self) -> int:
        """How many of the newest entries are always kept."""
        return -(-self.entries // 2) if self.recent is None else self.recent

    @property
    def event_trigger(self) -> Trigger:
        return EveryStep(self.entries, self.decode_update)

    @property
    def query_reduction(self) -> str | None:
        return "heads"

    @property
    def kept_scores(self) -> int:
        return self.entries

    def score(self, obs: Observation) -> Tensor:
        """Mass received so far: float32 [E, L, Hkv, n]."""
        return obs.accumulated_mass()

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The newest and the heaviest of the others: [E, L, Hkv, keep]."""
        return best_and_newest(scores[..., : length - self.newest], length, keep)
