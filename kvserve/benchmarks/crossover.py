"""The pool size below which a policy is faster than the full cache, and where it is slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class PoolPoint:
    """A policy on one pool: its throughput over that of ``none`` in the same turn, per turn."""

    blocks: int
    ratios: Sequence[float]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def wins(self) -> bool:
        return self.ratio > 1.0

    @property
    def undecided(self) -> bool:
        """Whether some turns say faster and others slower."""
        return min(self.ratios) <= 1.0 < max(self.ratios)


def crossovers(points: Sequence[PoolPoint]) -> list[float]:
    """Pool sizes, in blocks, where the median ratio passes 1, between neighbouring points."""
    found = []
    for small, large in pairwise(sorted(points, key=lambda point: point.blocks)):
        if small.wins != large.wins:
            part = (small.ratio - 1.0) / (small.ratio - large.ratio)
            found.append(small.blocks + part * (large.blocks - small.blocks))
    return found


def verdict(label: str, points: Sequence[PoolPoint], demand: int) -> str:
    """One sentence: the crossover, and where the policy loses."""
    points = sorted(points, key=lambda point: point.blocks)
    wins, losses = [p for p in points if p.wins], [p for p in points if not p.wins]
    at = crossovers(points)
    if not losses:
        text = f"faster than none on every pool measured: {_at(wins, demand)}; no crossover"
    elif not wins:
        text = f"loses to none on every pool measured: {_at(losses, demand)}; no crossover"
    else:
        sides = f"faster than none at {_at(wins, demand)}, loses at {_at(losses, demand)}"
        text = f"{sides}; the ratio passes 1 more than once, so there is no single crossover"
        if len(at) == 1:
            side = "below" if points[0].wins else "above"
            text = (
                f"beats none {side} a pool of about {at[0]:,.0f} blocks "
                f"({at[0] / demand:.2f} of the demand): {sides}"
            )
    unsure = [point for point in points if point.undecided]
    if unsure:
        text += f"; runs disagree at {', '.join(f'{p.blocks / demand:.2f}' for p in unsure)}"
    return f"{label}: {text}."


def _at(points: Sequence[PoolPoint], demand: int) -> str:
    return ", ".join(f"{point.blocks / demand:.2f} ({point.ratio:.2f}x)" for point in points)
