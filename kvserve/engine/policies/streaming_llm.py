"""StreamingLLM: the first entries and the newest ones (arXiv 2309.17453).

Attention sinks keep a sliding window stable (section 3.2). As kvserve runs it: keys keep the angle
of their original position, where the authors rotate by cache slot; a prompt is read whole and cut
at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, require
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import WhenOver


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keep the sinks and the newest entries; nothing is scored, no queries are logged.

    The baseline for endless chats: cheap, and blind to everything in between. No step holds more
    than budget entries after its prompt; with period 1 every step after that holds exactly budget.
    """

    name: ClassVar[str] = "streaming_llm"
    cost: ClassVar[str] = (
        "No scores and no log; with period 1 one move of the whole row in every decode step."
    )
    avoid: ClassVar[str] = "Anything between the sinks and the newest entries may be asked for."
    needs: ClassVar[tuple[str, ...]] = ("budget",)

    budget: int | None = common.required_budget(
        "entries held, sinks among them", least=2, above="sinks"
    )
    sinks: int = argument(4, "oldest entries that are always kept", least=0)
    period: int = argument(
        1,
        "entries evicted at once when the budget is full: larger costs less, and holds between "
        "budget - period + 1 and budget entries",
        least=1,
        note="at most budget - sinks",
    )
    remainder: str = common.remainder()
    rest_bits: float = common.rest_bits()

    def check(self) -> None:
        assert self.budget is not None
        most = self.budget - max(self.sinks, 1)
        require(self.period <= most, "period", self.period, f"in [1, {most}] (budget - sinks)")

    @property
    def event_trigger(self) -> Trigger:
        # An event comes before the step that stores one more entry.
        assert self.budget is not None
        keep = self.budget - self.period
        return WhenOver(self.budget, keep, 0, protect_prompt=False, intact=keep - self.sinks)

    def score(self, obs: Observation) -> Tensor:
        """Age decides: float32 [E, L, Hkv, n], +inf for the sinks."""
        keys = obs.keys
        age = torch.arange(keys.shape[-2], dtype=torch.float32, device=keys.device)
        age[: self.sinks] = torch.inf
        return age.expand(keys.shape[:-1])

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The sinks and the newest ``keep - sinks``: [E, L, Hkv, keep]."""
        place = torch.arange(keep, device=scores.device)
        kept = torch.where(place < self.sinks, place, place + (length - keep))
        return kept.expand(*scores.shape[:-1], keep)
