"""What a policy may look at when it scores: the only door from policies to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvserve.kernels.window_scores import AGGREGATES, window_scores

__all__ = ["AGGREGATES", "Observation"]


@dataclass(frozen=True, slots=True)
class Observation:
    """A batch of E equal-shaped events: ``queries [E, L, Hlog, W, D]``, ``keys [E, L, Hkv, n, D]``.

    Hlog is Hkv where the logged query is a group's mean, else Hq. ``scale`` multiplies q . k.
    """

    queries: Tensor
    keys: Tensor
    scale: float

    def mass(self, aggregate: str) -> Tensor:
        """Attention each key gets from the window: float32 [E, L, Hkv, n] (Kara, Eq. 4)."""
        return window_scores(self.queries, self.keys, self.scale, aggregate)
