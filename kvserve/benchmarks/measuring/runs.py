"""The runs of table rows, which alternate, and the figures of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvserve.benchmarks.measuring.measure import Figures
from kvserve.benchmarks.setup.policy_spec import PolicySpec


@dataclass
class Contestant:
    """One row: its label and facts, how it is run, and the figures of each run."""

    label: str
    spec: PolicySpec | None
    run: Callable[[str], Figures]
    facts: dict[str, Any] = field(default_factory=dict)
    runs: list[Figures] = field(default_factory=list)

    @property
    def title(self) -> str:
        return ", ".join([self.label, *(f"{name} {value}" for name, value in self.facts.items())])

    @property
    def rates(self) -> list[float]:
        return [run["output_tok_s"] for run in self.runs]

    def row(self, base: Contestant) -> dict[str, Any]:
        """The figures of the run with median throughput.

        The ratio is the median over turns, so that both of its sides saw the same load on the
        machine. Values of all runs are in ``..._all``.
        """
        by_rate = sorted(self.runs, key=lambda run: run["output_tok_s"])
        ratios = [rate / other for rate, other in zip(self.rates, base.rates, strict=False)]
        return {
            "policy": self.label,
            "policy_args": None if self.spec is None else self.spec.as_dict,
            **self.facts,
            **by_rate[(len(by_rate) - 1) // 2],
            "ratio_to_first": median(ratios),
            "ratio_to_first_all": ratios,
            "output_tok_s_all": self.rates,
            "spread": _spread(self.rates, ",.0f"),
            "ratio_spread": None if self is base else _spread(ratios, ".2f"),
        }


def run_in_turns(contestants: Sequence[Contestant], repeat: int) -> None:
    """Run every contestant once, then all of them again."""
    for turn in range(repeat):
        for contestant in contestants:
            title = contestant.title + (f" {turn + 1}/{repeat}" if repeat > 1 else "")
            contestant.runs.append(contestant.run(title))


def rows_against_first(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """Rows of the contestants that have run, each with its ratio to the first."""
    measured = [contestant for contestant in contestants if contestant.runs]
    return [contestant.row(measured[0]) for contestant in measured]


def _spread(values: Sequence[float], style: str) -> str | None:
    if len(values) < 2:
        return None
    return f"{min(values):{style}}–{max(values):{style}}"
