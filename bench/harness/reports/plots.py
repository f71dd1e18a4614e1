"""Short names of policies, and plots of measured rows; matplotlib is loaded when one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.reports.report import Row
from bench.harness.setup.policy_spec import PolicySpec

_ACROSS = 2  # panels in a line
_WIDTH = 10.0  # inches of a figure; pages show it at about this size
_INK = "#111111"
# Okabe and Ito's colours, which colour-blind readers can tell apart; lines also differ by markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555", "#000000")
_MARKERS = "osD^vPX*<>"
_Point = tuple[float, float, float, float]
"""x and y, and from where to where y's error bar goes."""
_STYLE: dict[Any, Any] = {
    **{"font.size": 11, "axes.titlesize": 11, "legend.fontsize": 11, "figure.titlesize": 12},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), _INK),
    **{"xtick.color": _INK, "ytick.color": _INK, "axes.grid": True, "grid.color": "#dddddd"},
    **{"axes.axisbelow": True, "lines.linewidth": 1.8, "errorbar.capsize": 2},
}

_HOW_MUCH = ("ratio", "budget", "threshold")  # fields that say how much a policy keeps, not how

Names = Mapping[str, str]
"""Short names by label."""


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
def plot_layers(shares: Any, title: str, xlabel: str, said: str, path: Path) -> None:
    """Write ``shares [layers, N]``, from 0 to 1, as colours: N along x, layers along y."""
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = panels([title], height=1.5 + 0.25 * len(shares))
    axes.grid(False)
    axes.set(xlabel=xlabel, ylabel="layer")
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
    image = axes.imshow(shares, vmin=0, vmax=1, cmap="cividis", **how)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label=said)
    figure.savefig(path, dpi=150)


@styled
def plot_evaluation(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write exact match, with its interval, against the bytes that a sequence holds: a panel per
    task.

    Bytes are the mean over the run, with logged queries. If some result has no such
    mean, all use the bytes of the entries at the end.
    """
    names = method_names(rows)
    key, label = "mean_held_bytes", "KiB per sequence, mean over the run, log included"
    if any(key not in row for row in rows):
        key, label = "held_bytes_at_end", "KiB of entries held per sequence at its end"
    figure = _lines(
        *(rows, "task", lambda row: names[method_label(row)]),
        lambda row: (row[key] / 2**10, row["exact_match"], *row["interval_95"]),
        height=5.5,
        axes={"xlabel": label, "ylabel": "exact match", "ylim": (0, 1.02)},
    )
    return save_figures({"accuracy": figure}, folder, names)


@styled
def plot_rows(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write throughput: by pool if there are several, else against accuracy if it was graded."""
    names = short_names(row["policy_args"] for row in rows)
    graded, varied = "exact_match" in rows[0], "pool_blocks" in rows[0]
    name = "accuracy-throughput" if graded and not varied else "throughput"
    draw = _throughput if varied else _against_accuracy if graded else _bars
    return save_figures({name: draw(rows, names)}, folder, names)


@styled
def plot_fidelity(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write KL divergence against bytes held, a panel per text; what is exact has no point."""
    names = method_names(rows)

    def point(row: Row) -> _Point | None:
        kl, error = row["kl"], row["kl_error"] or 0.0
        return (row["of_full"], kl, kl - error, kl + error) if kl > 0 else None

    figure = _lines(
        *(rows, "text", lambda row: names[method_label(row)], point),
        height=5.0,
        axes={
            **{"xlabel": "bytes held, of the full cache's", "ylabel": "KL, nats a token"},
            **{"xlim": (0, None), "yscale": "log"},
        },
    )
    return save_figures({"fidelity": figure}, folder, names)


@styled
def plot_frontier(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write KL divergence against bytes and against speed: a mark for each row, a line through
    those than which nothing smaller is closer, and the speed of what is exact as a dotted line."""
    figure, axes = panels(["", ""], height=5.0)
    looks = _looks(row["kv_cache_dtype"] for row in rows)
    sides = ("of_full", "bytes held"), ("ratio_to_first", "output tok/s on a quarter pool")
    for panel, (key, label) in zip(axes, sides, strict=True):
        shown = [row for row in rows if row[key] is not None and row["kl"] > 0]
        for dtype, look in looks.items():
            some = [row for row in shown if row["kv_cache_dtype"] == dtype]
            points = [row[key] for row in some], [row["kl"] for row in some]
            panel.plot(*points, label=dtype, **look | {"linestyle": "none"})
        for row in shown:
            beside: dict[str, Any] = {"xytext": (4, 3), "textcoords": "offset points"}
            panel.annotate(_named(row), (row[key], row["kl"]), fontsize=7, **beside)
        panel.set(xlabel=f"{label}, of the full cache's", yscale="log")
    best = sorted((row["of_full"], row["kl"]) for row in rows if row["frontier"] and row["kl"] > 0)
    axes[0].plot(*zip(*best, strict=True), color="#999999", zorder=0)
    axes[0].set(ylabel="KL to the full cache, nats a token", xlim=(0, None))
    for row in rows:
        if row["kl"] == 0 and row["ratio_to_first"]:
            axes[1].axvline(row["ratio_to_first"], color="#999999", linestyle=":", zorder=0)
            place = (row["ratio_to_first"], 0.01), axes[1].get_xaxis_transform()
            said = f"{_named(row)}, exact"
            axes[1].annotate(said, place[0], xycoords=place[1], rotation=90, fontsize=7)
    return save_figures({"frontier": figure}, folder, {})


def _named(row: Row) -> str:
    """A policy's name, with its ratio if that was set: budgets would fill the figure."""
    ratio = (row["policy_args"] or {}).get("ratio")
    return row["policy"].partition(":")[0] + (f" {ratio:g}" if ratio else "")


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


def save_figures(drawn: Mapping[str, Any], folder: Path, names: Names) -> list[Path]:
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


def _lines(
    rows: Sequence[Row],
    group: str,
    label: Callable[[Row], str],
    point: Callable[[Row], _Point | None],
    *,
    axes: Mapping[str, Any],
    titles: str = "{}",
    height: float = 4.2,
) -> Any:
    """A figure with a panel for each value of ``group``, and in it a line for each label, along x
    with error bars."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[group], []).append(row)
    figure, shown = panels([titles.format(value) for value in groups], height=height)
    looks = _looks(map(label, rows))
    for panel, members in zip(shown, groups.values(), strict=True):
        for name, look in looks.items():
            line = [found for row in members if label(row) == name and (found := point(row))]
            if line:
                x, y, low, high = np.array(sorted(line)).T
                panel.errorbar(x, y, [y - low, high - y], label=name, **look)
        panel.set(**axes)
    return figure


# ---- the figures -------------------------------------------------------------------------------


def _throughput(rows: Sequence[Row], names: Names) -> Any:
    """Output tokens per second and the range of runs, against the pool size, or with only one pool
    against the limit on running sequences."""
    by_pool = len({row["pool_share"] for row in rows}) > 1
    varied, fixed = ("pool_share", "max_num_seqs")[:: 1 if by_pool else -1]
    label = "pool, as a share of the demand" if by_pool else "sequences allowed at once"
    return _lines(
        *(rows, fixed, lambda row: _title(row, names)),
        lambda row: (row[varied], row["output_tok_s"], *_range(row)),
        titles="at most {} running" if by_pool else "pool of {:.2f}",
        axes={"xlabel": label, "ylabel": "output tok/s", "ylim": (0, None)},
    )


def _bars(rows: Sequence[Row], names: Names) -> Any:
    figure, (panel,) = panels([""], height=5.0)
    shown = rows[::-1]
    panel.barh([_title(row, names) for row in shown], [row["output_tok_s"] for row in shown])
    panel.set(xlabel="output tok/s")
    return figure


def _against_accuracy(rows: Sequence[Row], names: Names) -> Any:
    """A point per row: output tokens per second with the range of all runs, against exact match
    with its interval."""
    looks = _looks(_title(row, names) for row in rows)
    figure, (panel,) = panels([""], height=5.0)
    for row in rows:
        look = {**looks[_title(row, names)], "linestyle": "none", "markersize": 9}
        (low, high), (slowest, fastest) = row["interval_95"], _range(row)
        match, rate = row["exact_match"], row["output_tok_s"]
        reach = [[rate - slowest], [fastest - rate]], [[match - low], [high - match]]
        panel.errorbar([match], [rate], *reach, label=_title(row, names), **look)
    panel.set(xlabel="exact match", ylabel="output tok/s", ylim=(0, None), xlim=(-0.02, 1.02))
    return figure


def _range(row: Row) -> tuple[float, float]:
    return min(row["output_tok_s_all"]), max(row["output_tok_s_all"])


def _title(row: Row, names: Names) -> str:
    return names[row["policy"]] + stored_as(row)


# ---- names --------------------------------------------------------------------------------------


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
