"""Plots: names short enough for a legend, a figure per budget, colours for everybody's eyes."""

from __future__ import annotations

from typing import Any

from kvserve.benchmarks.reports import policy_names


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
