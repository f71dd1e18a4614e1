"""Plots: names short enough for a legend, a figure per budget, colours for everybody's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvserve.benchmarks.reports import plots, policy_names


def row(name: str, **fields: Any) -> dict[str, Any]:
    label = ",".join(f"{field}={value}" for field, value in fields.items())
    return {
        "policy": f"{name}:{label}" if label else name,
        "policy_args": {"name": name, **fields},
        **{"exact_match": 0.5, "interval_95": (0.4, 0.6), "mean_held_bytes": 2048.0},
        **{"output_tok_s": 9.0, "output_tok_s_all": [8.0, 9.0, 12.0], "task": "t"},
    }


def test_a_legend_tells_namesakes_apart_and_says_no_more() -> None:
    rows = [
        row("none"),
        row("kara", window=128, buffer=16),
        row("kara", window=128, buffer=16, ratio=0.2),
        row("kara", preset="paper", window=128, period=32),
        row("snapkv", trigger="threshold", budget=1025),
    ]
    names = policy_names.short_names(each["policy_args"] for each in rows)
    assert list(names.values()) == [
        *("none", "kara, buffer=16", "kara, buffer=16, ratio=0.2", "kara, preset=paper", "snapkv")
    ]
    assert len(set(names.values())) == len(rows)
    caption = policy_names.caption(names)
    assert "snapkv: trigger=threshold, budget=1025" in caption and "none" not in caption
    alike = policy_names.short_names(each["policy_args"] for each in (row("a", k=1), row("b", k=1)))
    assert policy_names.caption(alike) == "a; b: k=1"


def test_one_traffic_is_drawn_against_accuracy_where_it_was_graded(tmp_path: Path) -> None:
    rows = [row("none"), {**row("kara"), "kv_cache_dtype": "int8"}]
    assert plots.plot_rows(rows, tmp_path) == [tmp_path / "accuracy-throughput.png"]
    for each in rows:
        del each["exact_match"]
    assert plots.plot_rows(rows, tmp_path) == [tmp_path / "throughput.png"]
    assert plots._title(rows[1], {"kara": "kara"}) == "kara in int8"


def test_needles_have_a_figure_per_budget_with_equal_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {"lengths": [256], "depths": [0.0, 1.0], "exact_match": [[1.0, 0.5]]}
    rows = [{**row(name, **({"budget": b} if b else {})), "grid": grid} for name, b in (
        ("none", None), ("snapkv", 64), ("snapkv", 128), ("h2o", 128)
    )]  # fmt: skip
    columns: list[int] = []
    drawn = plots.panels

    def counted(*args: Any, **settings: Any) -> Any:
        figure, axes = drawn(*args, **settings)
        columns.append(axes[0].get_gridspec().ncols)
        return figure, axes

    monkeypatch.setattr(plots, "panels", counted)
    found = plots.plot_evaluation(rows, tmp_path)
    assert [path.name for path in found] == ["accuracy.png", "needles-64.png", "needles-128.png"]
    assert columns == [1, 4, 4] and all(path.exists() for path in found)


def test_no_two_lines_look_alike() -> None:
    looks = plots._looks(map(str, range(14)))
    assert len({tuple(look.items()) for look in looks.values()}) == 14
