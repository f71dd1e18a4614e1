"""Plots of a sweep's rows, and what all plots share; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvserve.benchmarks.policy_spec import PolicySpec
from kvserve.benchmarks.report import Row

_ACROSS = 4  # panels in a line
_HOW_MUCH = ("ratio", "budget", "threshold")  # fields that say how much a policy keeps, not how


def panels(titles: Sequence[str], *, width: float = 5.5, height: float = 4.0) -> tuple[Any, Any]:
    """A figure outside of pyplot's state, and its axes, one per title, a few in each line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(len(titles), _ACROSS)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for panel in axes[len(titles) :]:
        panel.remove()
    axes = axes[: len(titles)]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


def plot_sweep(
    rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write the plots of a sweep; that of accuracy only where answers were graded."""
    colours = _colours(row["policy"] for row in rows)
    drawn = {
        "throughput": _throughput(rows, crossings, colours),
        "running": _running(rows, colours),
    }
    if "exact_match" in rows[0]:
        drawn["accuracy"] = _accuracy({"accuracy against memory": rows})
    return _saved(drawn, folder)


def plot_evaluation(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write accuracy against memory, a panel per task, and the needle heatmaps if there are any."""
    by_task = {task: members for (task,), members in _groups(rows, "task").items()}
    drawn = {"accuracy": _accuracy(by_task)}
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


def _colours(names: Iterable[str]) -> dict[str, str]:
    return {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(names))}


def _method(row: Row) -> str:
    """The policy without how much it keeps: what a line of a plot goes along."""
    fields = {k: v for k, v in row["policy_args"].items() if k not in (*_HOW_MUCH, "name")}
    return PolicySpec(row["policy_args"]["name"], fields).label


def _groups(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _throughput(
    rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], colours: Mapping[str, str]
) -> Any:
    """Output tokens per second against what is varied, lowest to highest run; dotted: crossovers.

    That is the pool, in a panel per limit on what runs; or that limit, where there is one pool.
    """
    if len(_groups(rows, "pool_share")) == 1:
        varied, label = "max_num_seqs", "sequences allowed at once"
        groups = _groups(rows, "pool_share")
        titles = [f"pool {share:.2f} of the demand" for (share,) in groups]
    else:
        varied, label = "pool_share", "pool, as a share of the demand"
        groups = _groups(rows, "max_num_seqs")
        titles = [f"at most {seqs} running" for (seqs,) in groups]
    figure, axes = panels(titles)
    for panel, ((group,), members) in zip(axes, groups.items(), strict=True):
        for (policy,), line in _groups(members, "policy").items():
            rates = [row["output_tok_s"] for row in line]
            reach = [
                [row["output_tok_s"] - min(row["output_tok_s_all"]) for row in line],
                [max(row["output_tok_s_all"]) - row["output_tok_s"] for row in line],
            ]
            at = [row[varied] for row in line]
            panel.errorbar(
                at, rates, reach, label=policy, color=colours[policy], marker="o", capsize=2
            )
        for crossing in crossings:
            if varied == "pool_share" and crossing["max_num_seqs"] == group:
                for share in crossing["shares"]:
                    panel.axvline(share, color=colours[crossing["policy"]], linestyle=":")
        panel.set(xlabel=label, ylabel="output tok/s", ylim=(0, None))
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


def _accuracy(groups: Mapping[str, Sequence[Row]]) -> Any:
    """Exact match, with its interval, against the bytes that a sequence holds at its end; a line
    per method."""
    figure, axes = panels(list(groups), width=7.5, height=6.5)
    colours = _colours(_method(row) for rows in groups.values() for row in rows)
    for panel, rows in zip(axes, groups.values(), strict=True):
        for method, colour in colours.items():
            members = [row for row in rows if _method(row) == method]
            members.sort(key=lambda row: row["held_bytes_at_end"])
            matches = [row["exact_match"] for row in members]
            reach = [
                [row["exact_match"] - row["interval_95"][0] for row in members],
                [row["interval_95"][1] - row["exact_match"] for row in members],
            ]
            held = [row["held_bytes_at_end"] / 2**10 for row in members]
            panel.errorbar(held, matches, reach, label=method, color=colour, marker="o", capsize=2)
        panel.set(xlabel="KiB held per sequence at its end", ylabel="exact match", ylim=(0, 1.02))
    return figure


def _needles(rows: Sequence[Row]) -> Any:
    """Exact match by length and depth, a panel per policy; green is right."""
    titles = [f"{row['policy']}\nmean {row['exact_match']:.2f}" for row in rows]
    figure, axes = panels(titles, width=4.5)
    for panel, row in zip(axes, rows, strict=True):
        grid = row["grid"]
        depths = list(zip(*grid["exact_match"], strict=True))
        image = panel.imshow(depths, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_xticks(range(len(grid["lengths"])), grid["lengths"])
        panel.set_yticks(range(len(grid["depths"])), [f"{depth:.0%}" for depth in grid["depths"]])
        panel.set(xlabel="tokens of text", ylabel="depth of the needle")
    figure.colorbar(image, ax=list(axes), label="exact match")
    return figure
