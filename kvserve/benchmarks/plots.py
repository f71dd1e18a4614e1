"""Plots of a sweep's rows, and what all plots share; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvserve.benchmarks.report import Row


def panels(titles: Sequence[str], *, width: float = 5.5, height: float = 4.0) -> tuple[Any, Any]:
    """A figure outside of pyplot's state, and its axes side by side, one per title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(titles), squeeze=False)[0]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


def plot_sweep(
    rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write the plots of a sweep; that of accuracy only where answers were graded."""
    colours = _colours(rows)
    drawn = {
        "throughput": _throughput(rows, crossings, colours),
        "running": _running(rows, colours),
    }
    if "exact_match" in rows[0]:
        drawn["accuracy"] = _accuracy({"accuracy against memory": rows}, colours)
    return _saved(drawn, folder)


def plot_evaluation(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write accuracy against memory, a panel per task, and the needle heatmaps if there are any."""
    by_task = {task: members for (task,), members in _groups(rows, "task").items()}
    drawn = {"accuracy": _accuracy(by_task, _colours(rows))}
    grids = [row for row in rows if "grid" in row]
    if grids:
        drawn["needles"] = _needles(grids)
    return _saved(drawn, folder)


def _saved(drawn: Mapping[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        named = figure.axes[0].get_legend_handles_labels()
        if named[0]:
            figure.legend(*named, loc="outside lower center")
        figure.savefig(folder / f"{name}.png", dpi=150)
    return [folder / f"{name}.png" for name in drawn]


def _colours(rows: Sequence[Row]) -> dict[str, str]:
    policies = dict.fromkeys(row["policy"] for row in rows)
    return {policy: f"C{i % 10}" for i, policy in enumerate(policies)}


def _groups(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _throughput(
    rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> Any:
    """Output tokens per second against the pool, lowest to highest run; dotted: crossovers."""
    groups = _groups(rows, "max_num_seqs")
    figure, axes = panels([f"at most {seqs} running" for (seqs,) in groups])
    for panel, ((seqs,), members) in zip(axes, groups.items(), strict=True):
        for (policy,), line in _groups(members, "policy").items():
            rates = [row["output_tok_s"] for row in line]
            reach = [
                [row["output_tok_s"] - min(row["output_tok_s_all"]) for row in line],
                [max(row["output_tok_s_all"]) - row["output_tok_s"] for row in line],
            ]
            shares = [row["pool_share"] for row in line]
            panel.errorbar(
                shares, rates, reach, label=policy, color=colours[policy], marker="o", capsize=2
            )
        for crossing in crossings:
            if crossing["max_num_seqs"] == seqs:
                for share in crossing["shares"]:
                    panel.axvline(share, color=colours[crossing["policy"]], linestyle=":")
        panel.set(xlabel="pool, as a share of the demand", ylabel="output tok/s", ylim=(0, None))
    return figure


def _running(rows: Sequence[Row], colours: Mapping[str, str]) -> Any:
    """Running sequences over the steps of the median run, one panel per pool."""
    groups = _groups(rows, "pool_share", "max_num_seqs")
    figure, axes = panels([f"pool {share:.2f}, at most {seqs}" for share, seqs in groups], width=4)
    for panel, members in zip(axes, groups.values(), strict=True):
        for row in members:
            series = row["running_over_steps"]
            steps = [(i + 0.5) * row["steps"] / len(series) for i in range(len(series))]
            panel.plot(steps, series, label=row["policy"], color=colours[row["policy"]])
        panel.set(xlabel="step", ylabel="running sequences", ylim=(0, None))
    return figure


def _accuracy(groups: Mapping[str, Sequence[Row]], colours: Mapping[str, str]) -> Any:
    """Exact match, with its interval, against the bytes that a sequence holds at its end."""
    figure, axes = panels(list(groups))
    for panel, rows in zip(axes, groups.values(), strict=True):
        for (policy,), members in _groups(rows, "policy").items():
            matches = [row["exact_match"] for row in members]
            reach = [
                [row["exact_match"] - row["interval_95"][0] for row in members],
                [row["interval_95"][1] - row["exact_match"] for row in members],
            ]
            held = [row["held_bytes_at_end"] / 2**10 for row in members]
            panel.errorbar(
                held, matches, reach, label=policy, color=colours[policy], fmt="o", capsize=2
            )
        panel.set(xlabel="KiB held per sequence at its end", ylabel="exact match", ylim=(0, 1.02))
    return figure


def _needles(rows: Sequence[Row]) -> Any:
    """Exact match by length and depth, a panel per policy; green is right."""
    titles = [f"{row['policy']}, mean {row['exact_match']:.2f}" for row in rows]
    figure, axes = panels(titles, width=4.5)
    for panel, row in zip(axes, rows, strict=True):
        grid = row["grid"]
        depths = list(zip(*grid["exact_match"], strict=True))
        image = panel.imshow(depths, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_xticks(range(len(grid["lengths"])), grid["lengths"])
        panel.set_yticks(range(len(grid["depths"])), [f"{depth:.0%}" for depth in grid["depths"]])
        panel.set(xlabel="tokens of text", ylabel="depth of the needle")
    figure.colorbar(image, ax=axes[-1], label="exact match")
    return figure
