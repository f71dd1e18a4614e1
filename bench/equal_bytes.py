"""Policies at equal bytes: exact match of each method, interpolated at the same bytes held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from bench.harness.reports.plots import method_label, method_names
from bench.harness.reports.report import Column, Row, markdown_table

KEYS = ("mean_held_bytes", "held_bytes_at_end")
_POINTS = 5


def bytes_key(rows: Sequence[Row]) -> str:
    """The key of the mean over the run if every row has it, else of the bytes held at the end."""
    return KEYS[0] if all(KEYS[0] in row for row in rows) else KEYS[1]


def at_equal_bytes(rows: Sequence[Row], points: int = _POINTS) -> tuple[list[float], list[Row]]:
    """Sizes in bytes, and each method's exact match at each size.

    Between two measured points, values are interpolated linearly; outside its own points a method
    has none. Methods measured at one size only are left out. Rows of several tasks give no table.
    """
    if len({row.get("task") for row in rows}) > 1:
        return [], []
    key, names = bytes_key(rows), method_names(rows)
    measured: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        measured.setdefault(names[method_label(row)], []).append((row[key], row["exact_match"]))
    lines = {name: sorted(points) for name, points in measured.items() if len(points) > 1}
    if len(lines) < 2:
        return [], []
    ends = sorted((line[0][0], line[-1][0]) for line in lines.values())
    low, high = sorted(start for start, _ in ends)[1], sorted(end for _, end in ends)[-2]
    sizes = np.linspace(low, high, points).tolist()
    found: list[Row] = []
    for name, line in lines.items():
        held, matches = zip(*line, strict=True)
        figures = np.interp(sizes, held, matches, np.nan, np.nan).tolist()
        cells = {f"at{i}": None if np.isnan(x) else x for i, x in enumerate(figures)}
        found.append({"policy": name, **cells})
    return sizes, found


def equal_bytes_table(rows: Sequence[Row]) -> str | None:
    """The Markdown table, the best of each size in bold; ``None`` with fewer than two methods."""
    sizes, found = at_equal_bytes(rows)
    if not found:
        return None
    heads = [_column(f"at{i}", size, found) for i, size in enumerate(sizes)]
    return markdown_table((Column("exact match at", "policy", left=True), *heads), found)


def _column(key: str, size: float, rows: Sequence[Row]) -> Column:
    best = max((row[key] for row in rows if row[key] is not None), default=0.0)
    return Column(f"{size / 1024:,.0f} KiB", key, partial(_cell, best=best))


def _cell(value: float, best: float) -> str:
    return f"**{value:.2f}**" if value == best else f"{value:.2f}"
