"""The results of a soak, as JSON and as one page of Markdown."""

from __future__ import annotations

import json
import operator
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.benchmarks.reports.report import cpu_name, machine_facts

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


def write_report(
    checks: list[Check], findings: dict[str, Any], result: Path | None, page: Path | None
) -> None:
    """Write both files, if they are asked for."""
    about = {
        "benchmark": "soak",
        **machine_facts("python -m bench.soak", {"type": "cpu", "name": cpu_name()}),
        "rows": [check.row() for check in checks],
        **findings,
    }
    for file in (result, page):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
    if result is not None:
        result.write_text(json.dumps(about, indent=1) + "\n")
    if page is not None:
        page.write_text(_page(about))


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
        result.write_text(json.dumps({**about, **table}, indent=1) + "\n")


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


def _page(about: dict[str, Any]) -> str:
    load, health = about["load_average"], about["health_s"]
    lines = [
        "# Soak",
        "",
        f"`{about['command']}` on {about['device']['name']}, {about['cores']} cores, "
        f"{about['date'][:10]}, commit {about['commit'][:10]}. Load average while it ran: "
        f"{load['median']:.1f} (at most {load['most']:.1f}); others shared the machine where it is "
        f"above {about['cores']}.",
        "",
        "| what | found | wanted | |",
        "|---|---|---|---|",
    ]
    for row in about["rows"]:
        verdict = "yes" if row["holds"] else "**no**"
        lines.append(f"| {row['check']} | {row['found']:g} | {row['wanted']} | {verdict} |")
    lines += [
        "",
        f"{about['requests']:,} requests from {about['clients']} clients in {about['minutes']:g} "
        f"minutes, {about['streams_cut']:,} streams cut by their clients; the fixed request was "
        f"asked {about['fixed_request_equal']} times and always had the same tokens"
        + (
            "."
            if not about["fixed_request_other"]
            else f", but for {about['fixed_request_other']}."
        ),
        f"`/health` was asked {health['looks']:,} times: median {1000 * health['median']:.1f} ms, "
        f"p99 {1000 * health['p99']:.1f} ms, longest {1000 * health['longest']:.0f} ms.",
        "",
        "## Answers",
        "",
        "| kind: status | |",
        "|---|---|",
        *(f"| {kind} | {count:,} |" for kind, count in about["answers"].items()),
        "",
        "## Faults",
        "",
        "| fault | what came of it |",
        "|---|---|",
        *(
            f"| {each['fault']}, after {each['at_s']} s | {each['result']} |"
            for each in about["faults"]
        ),
        *(
            f"| a policy that fails ({kind}), {count} times | its own request ended |"
            for kind, count in about["injected_by_a_plug_in"].items()
        ),
        *(f"| {each['fault']} | {each['result']} |" for each in about["guests"]),
        "",
    ]
    lines += ["## Attacks mixed in", "", "| attack | answers |", "|---|---|"]
    for name, answers in about["mixed_attacks"].items():
        counts = ", ".join(f"{count} x {status}" for status, count in sorted(answers.items()))
        lines.append(f"| {name} | {counts} |")
    lines.append("")
    if about["attacks"]:
        lines += ["## Attacks", "", *attack_table(about["attacks"]), ""]
    if about["policies_refused_at_start"]:
        lines += ["Policies that this server refuses, and were left out:", ""]
        lines += [f"- {each[:200]}" for each in about["policies_refused_at_start"]]
        lines.append("")
    if about["surprises"]:
        lines += ["## Surprises", "", *(f"- {each[:300]}" for each in about["surprises"][:20]), ""]
    return "\n".join(lines)
