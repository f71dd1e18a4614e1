"""Plots of measured rows, and their common style; matplotlib is loaded when one is drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from kvserve.benchmarks.reports.policy_names import (
    Names,
    caption,
    method_label,
    method_names,
    short_names,
    stored_as,
)
from kvserve.benchmarks.reports.report import Row

_ACROSS = 2  # panels in a line
_WIDTH = 10.0  # inches of a figure; pages show it at about this size
_INK = "#111111"
# Okabe and Ito's colours, which colour-blind readers can tell apart; lines also differ by markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#000000")
_MARKERS = "osD^vPX*<>"
_STYLE: dict[Any, Any] = {
    **{"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 11, "figure.titlesize": 12},
    **{
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "axes.titlecolor": _INK,
    },
    **{"xtick.color": _INK, "ytick.color": _INK, "axes.grid": True, "grid.color": "#dddddd"},
    **{"axes.axisbelow": True, "lines.linewidth": 1.8},
}


def styled(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Give everything that ``draw`` draws the project's font sizes and dark ink."""

    @wraps(draw)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        from matplotlib import rc_context

        with rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def panels(
    titles: Sequence[str], *, height: float = 4.2, columns: int | None = None
) -> tuple[Any, Any]:
    """A figure outside pyplot's state, and its axes, one per title, a few in each line.

    ``columns``: the number in each line, even if there are fewer titles.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = columns or min(len(titles), _ACROSS)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(_WIDTH, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for panel in axes[len(titles) :]:
        panel.remove()
    axes = axes[: len(titles)]
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


@styled
def plot_sweep(
    rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], folder: Path
) -> list[Path]:
    """Write the plots of a sweep; the accuracy plot only if answers were graded."""
    names = short_names(row["policy_args"] for row in rows)
    if "output_len" in rows[0]:
        return _saved({"lengths": _lengths(rows, names)}, folder, names)
    drawn = {
        "throughput": _throughput(rows, crossings, names),
        "running": _running(rows, names),
    }
    if "exact_match" in rows[0]:
        drawn["accuracy"] = _accuracy({"accuracy against memory": rows})
    return _saved(drawn, folder, names)


@styled
def plot_evaluation(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write accuracy against memory, a panel per task, and the needle heatmaps if there are any."""
    by_task = {task: members for (task,), members in _groups(rows, "task").items()}
    saved = _saved({"accuracy": _accuracy(by_task)}, folder, method_names(rows))
    grids = [row for row in rows if "grid" in row]
    return saved + _saved(_needles(grids), folder, method_names(grids))


@styled
def plot_rows(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the plot of one traffic's rows: throughput, against accuracy if answers were graded."""
    rows = [row for row in rows if row["policy_args"] is not None]
    names = short_names(row["policy_args"] for row in rows)
    graded = bool(rows) and "exact_match" in rows[0]
    drawn = {"accuracy-throughput" if graded else "throughput": _one_traffic(rows, names, graded)}
    return _saved(drawn, folder, names)


# ---- colours -------------------------------------------------------------------------


def _looks(labels: Iterable[str]) -> dict[str, dict[str, str]]:
    """A colour and a marker for every label, assigned in order of appearance."""
    return {
        label: {
            "color": _COLOURS[i % len(_COLOURS)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "linestyle": "-" if i < len(_COLOURS) else "--",
        }
        for i, label in enumerate(dict.fromkeys(labels))
    }


def _saved(drawn: Mapping[str, Any], folder: Path, names: Names) -> list[Path]:
    """Save each figure under its name, with a legend above and a caption below."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        lines = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
        if lines:
            columns = min(5, len(lines))
            figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=columns)
        if told := caption(names):
            figure.supxlabel(told, fontsize=9, ha="left", x=0.02, color=_INK)
        figure.savefig(folder / f"{name}.png", dpi=120)
    return [folder / f"{name}.png" for name in drawn]


def _groups(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _reach(line: Sequence[Row], middle: str, low: Any, high: Any) -> list[list[float]]:
    """Lengths of error bars down and up; ``low`` and ``high`` read a row."""
    return [
        [row[middle] - low(row) for row in line],
        [high(row) - row[middle] for row in line],
    ]


# ---- the figures -------------------------------------------------------------------------------


def _throughput(rows: Sequence[Row], crossings: Sequence[Mapping[str, Any]], names: Names) -> Any:
    """Output tokens per second and the range of runs, against the pool size; dotted: crossovers.

    There is a panel for each limit on running sequences. With only one pool size, that limit is on
    the x axis instead.
    """
    looks = _looks(names)
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
            reach = _reach(
                line,
                "output_tok_s",
                lambda row: min(row["output_tok_s_all"]),
                lambda row: max(row["output_tok_s_all"]),
            )
            at = [row[varied] for row in line]
            panel.errorbar(at, rates, reach, label=names[policy], capsize=2, **looks[policy])
        for crossing in crossings:
            if varied == "pool_share" and crossing["max_num_seqs"] == group:
                colour = looks[crossing["policy"]]["color"]
                for share in crossing["shares"]:
                    panel.axvline(share, color=colour, linestyle=":")
        panel.set(xlabel=label, ylabel="output tok/s", ylim=(0, None))
    return figure


def _lengths(rows: Sequence[Row], names: Names) -> Any:
    """Throughput over that of the full cache, against mean answer length; one panel per pool."""
    looks = _looks(names)
    groups: dict[float, list[Row]] = {}
    for row in rows:
        groups.setdefault(round(row["pool_share"], 2), []).append(row)
    figure, axes = panels([f"pool {share:.2f} of the demand" for share in groups])
    for panel, members in zip(axes, groups.values(), strict=True):
        for (policy,), line in _groups(members, "policy").items():
            reach = _reach(
                line,
                "ratio_to_none",
                lambda row: min(row["ratio_to_none_all"]),
                lambda row: max(row["ratio_to_none_all"]),
            )
            at, ratios = [row["output_len"] for row in line], [row["ratio_to_none"] for row in line]
            panel.errorbar(at, ratios, reach, label=names[policy], capsize=2, **looks[policy])
        disturbed = [row for row in members if row.get("disturbed")]  # marked by hand in the file
        if disturbed:
            at, ratios = (
                [row[key] for row in disturbed] for key in ("output_len", "ratio_to_none")
            )
            mark = {"s": 160, "facecolors": "none", "edgecolors": _INK}
            panel.scatter(at, ratios, label="another program ran beside it", zorder=3, **mark)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["output_len"] for row in members})
        panel.set_xticks(ticks, [f"{tick:,d}" for tick in ticks])
        panel.set(xlabel="mean tokens of an answer", ylabel="output tok/s, of none", ylim=(0, None))
    return figure


def _one_traffic(rows: Sequence[Row], names: Names, graded: bool) -> Any:
    """A point per row: output tokens per second with the range of all runs, against exact match
    with its interval. Without grades: bars of throughput."""
    looks = _looks(_title(row, names) for row in rows)
    figure, (panel,) = panels([""], height=5.0)
    if not graded:
        shown = rows[::-1]
        panel.barh(
            [_title(row, names) for row in shown],
            [row["output_tok_s"] for row in shown],
            color=[looks[_title(row, names)]["color"] for row in shown],
        )
        panel.set(xlabel="output tok/s")
        return figure
    for row in rows:
        look = {**looks[_title(row, names)], "linestyle": "none", "markersize": 9}
        low, high = row["interval_95"]
        rates = row["output_tok_s_all"]
        panel.errorbar(
            [row["exact_match"]],
            [row["output_tok_s"]],
            [[row["output_tok_s"] - min(rates)], [max(rates) - row["output_tok_s"]]],
            [[row["exact_match"] - low], [high - row["exact_match"]]],
            label=_title(row, names),
            capsize=2,
            **look,
        )
    panel.set(xlabel="exact match", ylabel="output tok/s", ylim=(0, None), xlim=(-0.02, 1.02))
    return figure


def _title(row: Row, names: Names) -> str:
    return names[row["policy"]] + stored_as(row)


def _running(rows: Sequence[Row], names: Names) -> Any:
    """Running sequences over the steps of the median run, one panel per pool."""
    looks = _looks(names)
    groups = _groups(rows, "pool_share", "max_num_seqs")
    figure, axes = panels([f"pool {share:.2f}, at most {seqs}" for share, seqs in groups])
    for panel, members in zip(axes, groups.values(), strict=True):
        for row in members:
            series = row["running_over_steps"]
            steps = [(i + 0.5) * row["steps"] / len(series) for i in range(len(series))]
            look = {**looks[row["policy"]], "marker": ""}
            panel.plot(steps, series, label=names[row["policy"]], **look)
        panel.set(xlabel="step", ylabel="running sequences", ylim=(0, None))
    return figure


def _accuracy(groups: Mapping[str, Sequence[Row]]) -> Any:
    """Exact match, with its interval, against the bytes that a sequence holds; a line per method.

    Bytes are the mean over the run, with logged queries. If some result has no such
    mean, all use the bytes of the entries at the end.
    """
    every = [row for rows in groups.values() for row in rows]
    names, looks = method_names(every), _looks(map(method_label, every))
    key, label = "mean_held_bytes", "KiB per sequence, mean over the run, log included"
    if any(key not in row for row in every):
        key, label = "held_bytes_at_end", "KiB of entries held per sequence at its end"
    figure, axes = panels(list(groups), height=5.5)
    for panel, rows in zip(axes, groups.values(), strict=True):
        for method, look in looks.items():
            members = [row for row in rows if method_label(row) == method]
            members.sort(key=lambda row: row[key])
            matches = [row["exact_match"] for row in members]
            reach = _reach(
                members,
                "exact_match",
                lambda row: row["interval_95"][0],
                lambda row: row["interval_95"][1],
            )
            held = [row[key] / 2**10 for row in members]
            panel.errorbar(held, matches, reach, label=names[method], capsize=2, **look)
        panel.set(xlabel=label, ylabel="exact match", ylim=(0, 1.02))
    return figure


def _needles(rows: Sequence[Row]) -> dict[str, Any]:
    """Exact match by length and depth: a figure per budget, a panel per policy; light is right."""
    by_budget: dict[Any, list[Row]] = {}
    for row in rows:
        fields = row["policy_args"]
        kept = [fields[field] for field in ("budget", "ratio") if field in fields]
        if kept:
            by_budget.setdefault(kept[0], []).append(row)
    whole = [row for row in rows if not any(row in some for some in by_budget.values())]
    return {
        f"needles-{kept}": _needle_figure([*whole, *some], f"{kept:g} kept")
        for kept, some in by_budget.items()
    } or ({"needles": _needle_figure(whole, "")} if whole else {})


def _needle_figure(rows: Sequence[Row], title: str) -> Any:
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
