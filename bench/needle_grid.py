"""The papers' needle heatmap: one secret number at every depth of texts of every length.

Lengths are in tokens of the shipped tokenizer, depths go from 0 (first) to 1 (last).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.datasets.task_text import (
    DIGITS,
    Sample,
    draw_names,
    filler_sentences,
    secrets_of,
)
from bench.harness.datasets.tasks import Grade
from bench.harness.datasets.workload import Source, TaskPrompts
from bench.harness.reports.plots import (
    method_names,
    panels,
    save_figures,
    stored_as,
    styled,
)
from bench.harness.reports.report import Row

NEEDLE_GRID = "needle-grid"
_OTHERS = 7
_MAX_NEW_TOKENS = 8


def needle_at(rng: random.Random, units: int, depth: float) -> Sample:
    """One secret number at a depth of a text, and others anywhere in it."""
    names = draw_names(rng, 1 + _OTHERS, held_out=True)
    values = ["".join(rng.choices(DIGITS, k=4)) for _ in names]
    asked, *rest = secrets_of(names, values)
    text = filler_sentences(rng, [asked, *rest], units)
    for sentence in rest:
        text.insert(rng.randint(0, len(text)), sentence)
    text.insert(round(depth * len(text)), asked)
    question = f"{''.join(text).lstrip()} What is the secret number of {names[0]}?"
    return Sample("needle", (question,), (values[0],), (values[0],))


def needle_grid(source: Source) -> TaskPrompts:
    """``source.count`` samples for each of ``--grid-lengths`` and ``--grid-depths``."""
    samples = [
        needle_at(random.Random(f"{NEEDLE_GRID}/{source.seed}/{length}/{depth}/{i}"), length, depth)
        for length, depth in product(source["grid_lengths"], source["grid_depths"])
        for i in range(source.count)
    ]
    return TaskPrompts(samples, source.tokenizer, _MAX_NEW_TOKENS, _grade)


def _grade(sample: Sample, outputs: Sequence[str]) -> Grade:
    right = outputs[0].strip() == sample.finals[0]
    return Grade(right, float(right))


def by_cell(
    grades: Sequence[Grade], lengths: Sequence[int], depths: Sequence[float]
) -> dict[str, Any]:
    """Exact match by length and depth: ``exact_match [lengths, depths]``."""
    cells = np.array([each.exact for each in grades], float)
    matches = cells.reshape(len(lengths), len(depths), -1).mean(2).round(4).tolist()
    return {"lengths": list(lengths), "depths": list(depths), "exact_match": matches}


@styled
def plot_needles(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write exact match by length and depth: a figure per budget, a panel per policy; light is
    right."""
    by_budget: dict[Any, list[Row]] = {}
    for row in rows:
        fields = row["policy_args"]
        kept = [fields[field] for field in ("budget", "ratio") if field in fields]
        if kept:
            by_budget.setdefault(kept[0], []).append(row)
    whole = [row for row in rows if not any(row in some for some in by_budget.values())]
    figures = {
        f"needles-{kept}": _figure([*whole, *some], f"{kept:g} kept")
        for kept, some in by_budget.items()
    }
    if not figures and whole:
        figures = {"needles": _figure(whole, "")}
    return save_figures(figures, folder, method_names(rows))


def _figure(rows: Sequence[Row], title: str) -> Any:
    titles = [
        f"{row['policy_args']['name']}{stored_as(row)}, mean {row['exact_match']:.2f}"
        for row in rows
    ]
    figure, axes = panels(titles, height=3.0, columns=4)
    figure.suptitle(title)
    for panel, row in zip(axes, rows, strict=True):
        grid = row["grid"]
        depths = list(zip(*grid["exact_match"], strict=True))
        image = panel.imshow(depths, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        panel.grid(False)
        panel.set_xticks(range(len(grid["lengths"])), grid["lengths"], rotation=45)
        panel.set_yticks(range(len(grid["depths"])), [f"{depth:.0%}" for depth in grid["depths"]])
        panel.set(xlabel="tokens of text", ylabel="depth")
    figure.colorbar(image, ax=list(axes), label="exact match")
    return figure
