"""The results of a soak: checks, and a JSON file."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.reports.report import cpu_name, machine_facts, to_json

_COMPARE = {"==": operator.eq, "<=": operator.le}


@dataclass(frozen=True)
class Check:
    """A figure and its limit."""

    what: str
    limit: float
    found: float
    relation: str

    @property
    def holds(self) -> bool:
        return bool(_COMPARE[self.relation](self.found, self.limit))

    def row(self) -> dict[str, Any]:
        """The check's row in the JSON file."""
        wanted = f"{self.relation} {self.limit:g}"
        return {"check": self.what, "found": self.found, "wanted": wanted, "holds": self.holds}


def write_report(checks: list[Check], findings: dict[str, Any], result: Path | None) -> None:
    """Write the JSON file, if it is asked for."""
    if result is None:
        return
    facts = machine_facts("python -m bench.soak", {"type": "cpu", "name": cpu_name()})
    rows = [check.row() for check in checks]
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(to_json({"benchmark": "soak", **facts, "rows": rows, **findings}) + "\n")


def write_attacks(rows: list[dict[str, Any]], checks: list[Check], result: Path | None) -> None:
    """The attack matrix alone: as a table, and as JSON if it is asked for."""
    sys.stdout.write("\n".join(attack_table(rows)) + "\n")
    for check in checks:
        sys.stdout.write(json.dumps(check.row()) + "\n")
    if result is not None:
        device = {"type": "cpu", "name": cpu_name()}
        about = {"benchmark": "attacks", **machine_facts("python -m bench.soak.attacks", device)}
        result.parent.mkdir(parents=True, exist_ok=True)
        table = {"rows": rows, "checks": [check.row() for check in checks]}
        result.write_text(to_json({**about, **table}) + "\n")


def attack_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: what others wait beside each attack."""
    lines = [
        "| attack | took, s | answers | stream's longest gap, s | plain request's longest, s "
        "| memory grew by, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        answers = ", ".join(f"{count} x {status}" for status, count in row["answers"].items())
        lines.append(
            f"| {row['attack']} | {row['seconds']:g} | {answers} | {row['gap_s']:.2f} "
            f"| {row['plain_s']:.2f} | {row['growth_mib']:.0f} |"
        )
    return lines
