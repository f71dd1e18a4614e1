"""Keep everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.trigger import Never, Trigger


@dataclass(frozen=True)
class NoCompression:
    """Full KV cache, exact; no event is ever due."""

    name: ClassVar[str] = "none"
    granularity: ClassVar[Granularity] = Granularity.MODEL

    @property
    def trigger(self) -> Trigger:
        return Never()

    @property
    def query_reduce(self) -> str | None:
        return None

    def score(self, obs: Observation) -> Tensor:
        raise AssertionError("none has no events")

    def select(self, scores: Tensor) -> Tensor:
        raise AssertionError("none has no events")
