"""Short names of policies, for plots and for tables that give the arguments elsewhere."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvserve.benchmarks.reports.report import Row
from kvserve.benchmarks.setup.policy_spec import PolicySpec

_HOW_MUCH = ("ratio", "budget", "threshold")  # fields that say how much a policy keeps, not how

Names = Mapping[str, str]
"""Short names by label."""


def short_names(policies: Iterable[Mapping[str, Any]], *without: str) -> dict[str, str]:
    """For each label, the policy's name with only the fields that tell it from others of that name.

    ``without``: fields that are not part of the label.
    """
    specs = {}
    for fields in policies:
        kept = {k: v for k, v in fields.items() if k not in (*without, "name")}
        spec = PolicySpec(fields["name"], kept)
        specs[spec.label] = spec
    names: dict[str, str] = {}
    for label, spec in specs.items():
        others = [each for each in specs.values() if each.name == spec.name and each is not spec]
        told: list[str] = []
        for field, value in spec.fields.items():
            alike = [each for each in others if each.fields.get(field) == value]
            if len(alike) < len(others):
                told, others = [*told, f"{field}={value}"], alike
        names[label] = ", ".join([spec.name, *told])
    return names


def method_label(row: Row) -> str:
    """The policy without the fields that say how much it keeps; each has one line in a plot."""
    return _policy_label(row) + stored_as(row)


def stored_as(row: Row) -> str:
    """How entries are stored, if not as computed."""
    dtype = row.get("kv_cache_dtype") or "auto"
    return "" if dtype == "auto" else f" in {dtype}"


def _policy_label(row: Row) -> str:
    fields = {k: v for k, v in row["policy_args"].items() if k not in (*_HOW_MUCH, "name")}
    return PolicySpec(row["policy_args"]["name"], fields).label


def method_names(rows: Sequence[Row]) -> dict[str, str]:
    short = short_names((row["policy_args"] for row in rows), *_HOW_MUCH)
    return {method_label(row): short[_policy_label(row)] + stored_as(row) for row in rows}


def caption(names: Names) -> str:
    """The arguments that the legend leaves out; policies with equal arguments share a line."""
    same: dict[str, list[str]] = {}
    for label, name in names.items():
        if fields := label.partition(":")[2].partition(" in ")[0]:
            same.setdefault(fields.replace(",", ", "), []).append(name)
    told = [f"{'; '.join(members)}: {fields}" for fields, members in same.items()]
    return "\n".join(line for each in told for line in textwrap.wrap(each, 130))
