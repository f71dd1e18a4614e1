"""Where a policy is faster than the full cache, where it is slower, and the crossovers between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median


@dataclass(frozen=True)
class Point:
    """A policy at one pool size (blocks) or answer length (tokens); ``ratios``: per turn, its
    throughput over that of ``none``."""

    at: int
    ratios: Sequence[float]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def wins(self) -> bool:
        return self.ratio > 1.0

    @property
    def undecided(self) -> bool:
        """Whether the policy is faster in some turns and slower in others."""
        return min(self.ratios) <= 1.0 < max(self.ratios)


def crossovers(points: Sequence[Point]) -> list[float]:
    """Where the median ratio passes 1, between neighbouring points."""
    found = []
    for small, large in pairwise(sorted(points, key=lambda point: point.at)):
        if small.wins != large.wins:
            part = (small.ratio - 1.0) / (small.ratio - large.ratio)
            found.append(small.at + part * (large.at - small.at))
    return found


def verdict(label: str, points: Sequence[Point], demand: int) -> str:
    """One sentence: the pool size where the ratio passes 1, and where the policy loses."""

    def place(blocks: float) -> str:
        return f"a pool of about {blocks:,.0f} blocks ({blocks / demand:.2f} of the demand)"

    return _sentence(label, points, place, lambda blocks: f"{blocks / demand:.2f}", "pool")


def length_verdict(label: str, points: Sequence[Point]) -> str:
    """One sentence: the length of answers where the ratio passes 1, and where the policy loses."""
    return _sentence(
        label,
        points,
        lambda tokens: f"answers of about {tokens:,.0f} tokens",
        lambda tokens: f"{tokens:,d}",
        "length",
    )


def _sentence(
    label: str,
    points: Sequence[Point],
    place: Callable[[float], str],
    short: Callable[[int], str],
    what: str,
) -> str:
    """``place`` describes a crossover, ``short`` a measured point; ``what`` is varied."""

    def listed(some: Sequence[Point]) -> str:
        return ", ".join(f"{short(point.at)} ({point.ratio:.2f}x)" for point in some)

    points = sorted(points, key=lambda point: point.at)
    wins, losses = [p for p in points if p.wins], [p for p in points if not p.wins]
    at = crossovers(points)
    if not losses:
        text = f"faster than none on every {what} measured: {listed(wins)}; no crossover"
    elif not wins:
        text = f"loses to none on every {what} measured: {listed(losses)}; no crossover"
    else:
        sides = f"faster than none at {listed(wins)}, loses at {listed(losses)}"
        text = f"{sides}; the ratio passes 1 more than once, so there is no single crossover"
        if len(at) == 1:
            side = "below" if points[0].wins else "above"
            text = f"beats none {side} {place(at[0])}: {sides}"
    unsure = [point for point in points if point.undecided]
    if unsure:
        text += f"; runs disagree at {', '.join(short(point.at) for point in unsure)}"
    return f"{label}: {text}."
