"""docs/benchmarks.md: a summary and plots first, then the tables of all measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.equal_bytes import equal_bytes_table
from bench.report.long_traces import LONG, REMAINDERS
from bench.report.measurement import PLOTS, ROOT, Measurement
from bench.report.measurements import SUITE
from kvserve.benchmarks.reports.policy_names import short_names
from kvserve.benchmarks.reports.report import Column, Row, describe_machine, markdown_table

PAGE = ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
_BEGIN, _END = "<!-- written by python -m bench.suite document -->\n", "<!-- end -->"
BY_HAND = ROOT / "docs" / "rankings.md"
# Figures that are only in the JSON files.
_LEFT_OUT = frozenset(
    (
        *("output_tokens", "wall_s", "peak_running", "mean_pool_usage", "allocated_bytes_at_end"),
        *("evicted_tokens", "early_compactions", "blocks_released", "swaps", "prompt_cached"),
        *("steps", "itl_p50_ms", "seed", "ratio_spread"),
    )
)
_EQUAL_BYTES = (
    "The same at equal bytes per sequence, read off each method's line between the sizes that were "
    "measured; a dash is beyond them."
)
_SUMMARY = (
    Column("traffic", "title", left=True),
    Column("policy", "policy", left=True),
    Column("cache held in", "kv_cache_dtype", left=True),
    Column("output tok/s", "output_tok_s", ",.0f"),
    Column("of `none`", "ratio_to_first", ".2f"),
    Column("of vLLM", "vs_vllm", ".2f"),
    Column("exact match", "exact_match", ".3f"),
    Column("KiB per sequence, mean", "kib", ",.0f"),
)

_GRADED = tuple(
    column
    for column in _SUMMARY
    if column.key in ("policy", "output_tok_s", "ratio_to_first", "exact_match", "kib")
)

_HEAD = """\
# Benchmarks

Written by `python -m bench.suite document` from [bench/results](../bench/results), which
`python -m bench.suite run` fills. The shipped model is small and its tasks are synthetic: these
figures show what the machinery gives and costs, not how the methods rank on large models.

Kara's default changed on 2026-11-23: it keeps a tenth of a window instead of three, and leaves a
[remainder](remainders.md). What is dated before that was measured with the default of then.

Every throughput is output tokens over wall time. Rows of one table took turns; a ratio is the
median of those within each turn. A pool that is a share of the demand has as many *bytes* for every
row, whatever its layout, its policy's log or the type that its cache is held in.

Yours is measured by the same commands with `--model`:

| command | what it says |
|---|---|
| `kvserve bench sweep` | below which pool a policy beats the full cache, where it loses |
| `kvserve bench throughput` | policies, prefix caching, transformers, on one pool |
| `kvserve bench latency` | one batch from end to end |
| `kvserve bench policies` | one event, in decode steps |
| `kvserve bench serve` | a server from outside, open-loop; also another's, as vLLM's |
| `kvserve eval` | accuracy: shipped tasks, needles, files of GSM8K, MATH, AIME, RULER, LongBench |
| `python -m bench.cpu_peers` | vLLM, llama.cpp and transformers on the same CPU (`make peers`) |
| `python -m bench.cpu_products` | matrix products on a CPU: compiled, oneDNN's, torch's |
| `python -m bench.kvpress_accuracy` | kvpress on the same prompts, as many entries kept |
| `python -m bench.repeatability` | whether a row of this page comes out the same again |

Datasets (`random`, `prefix_repetition`, `sharegpt`, `custom`, `timed_trace`), their flags, and the
JSON keys of `bench serve` and `bench latency` are named as vLLM's.
"""


def page() -> str:
    """The whole of docs/benchmarks.md."""
    by_hand = BY_HAND.read_text().rstrip()
    parts = [_HEAD.rstrip(), *summary(), *map(section, SUITE), by_hand]
    return "\n\n".join(parts) + "\n"


def readme() -> str:
    """README.md with the newest results between its two marks: table and plot of the graded long
    task, and the ratios of the other long traces."""
    text = README.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    graded, *others = REMAINDERS
    parts = [markdown_table(_GRADED, _rows(graded))]
    parts.append("\n".join(line for each in others if (line := _ratios(each))))
    lead = "\n\n".join(parts)
    return f"{before}{_BEGIN}{lead}\n{_END}{after}"


def _ratios(measurement: Measurement) -> str:
    """One line: each policy's throughput over that of ``none``, or of vLLM."""
    said = []
    for key, base in (("ratio_to_first", "`none`"), ("vs_vllm", "vLLM")):
        rows = [row for row in _rows(measurement) if row.get(key) not in (None, 1.0)]
        found = ", ".join(f"{row[key]:.2f} ({_name(row)})" for row in rows)
        said += [f"{found} times {base}"] if rows else []
    return f"- {measurement.title}: {'; '.join(said)}." if said else ""


def _name(row: Row) -> str:
    held = row.get("kv_cache_dtype") or "auto"
    name = row["policy"] if row.get("engine", "kvserve") == "kvserve" else row["engine"]
    return str(name) if held == "auto" else f"{name} in {held}"


def summary() -> list[str]:
    """One table of all long traces, their plots, and what the sweeps found."""
    rows, plots, notes = [], [], []
    for measurement in (*REMAINDERS, *LONG):
        result = measurement.newest()
        if result is None:
            continue
        plots += pictures(measurement)
        if result["benchmark"] == "sweep":
            notes += [f"- {note}" for note in result["notes"]]
            continue
        rows += _rows(measurement)
    if not rows:
        return []
    return ["## Long traces", markdown_table(_SUMMARY, rows), *plots, "\n".join(notes)]


def _rows(measurement: Measurement) -> list[dict[str, Any]]:
    """A measurement's rows in the summary; the first row has its title."""
    result = measurement.newest()
    if result is None or result["benchmark"] == "sweep":
        return []
    rows = shortened(result["rows"])
    for i, row in enumerate(rows):
        held = row.get("mean_held_bytes")
        row["title"] = "" if i else measurement.title
        row["kib"] = None if held is None else held / 2**10
    return rows


def shortened(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with short names of policies; the command above a table has their arguments."""
    names = short_names(row["policy_args"] for row in rows if row.get("policy_args"))
    return [{**row, "policy": names.get(row.get("policy", ""), row.get("policy"))} for row in rows]


def pictures(measurement: Measurement) -> list[str]:
    found = sorted((PLOTS / measurement.name).glob("*.png")) if measurement.plots else []
    return [f"![{path.stem}]({path.relative_to(PAGE.parent)})" for path in found]


def section(measurement: Measurement) -> str:
    """A section of the page; without a result, only the command that would make it."""
    parts = [f"## {measurement.title}", *filter(None, [measurement.text])]
    result = measurement.newest()
    planned = f"{measurement.program} {measurement.command}"
    command = planned if result is None else result["command"]
    parts.append(f"```\n{command}\n```")
    if result is None:
        return "\n\n".join([*parts, "Not measured yet."])
    parts += [f"{line}." for line in (*result["about"], describe_machine(result), result["date"])]
    keys = [key for key in result["columns"] if key not in _LEFT_OUT]
    parts.append(markdown_table(measurement.table(keys), shortened(result["rows"])))
    parts += [f"- {note}" for note in result["notes"]]
    if measurement.equal_bytes and (table := equal_bytes_table(result["rows"])):
        parts += [_EQUAL_BYTES, table]
    if measurement not in (*REMAINDERS, *LONG):  # their plots stand before all tables
        parts += pictures(measurement)
    return "\n\n".join(parts)
