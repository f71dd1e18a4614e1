"""docs/benchmarks.md, its chapters under docs/benchmarks, and the table at the top of README.md."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

from bench.equal_bytes import equal_bytes_table
from bench.report.long_traces import EQUAL, LONG, PEERS
from bench.report.measurement import PLOTS, ROOT, Chapter, Measurement
from bench.report.measurements import CHAPTERS
from kvserve.benchmarks.reports.policy_names import short_names
from kvserve.benchmarks.reports.report import Column, Row, describe_machine, markdown_table

PAGE = ROOT / "docs" / "benchmarks.md"
CHAPTERS_FOLDER = ROOT / "docs" / "benchmarks"
README = ROOT / "README.md"
_BEGIN, _END = "<!-- written by python -m bench.suite document -->\n", "<!-- end -->"
# Figures that are only in the JSON files.
_LEFT_OUT = frozenset(
    (
        *("output_tokens", "wall_s", "peak_running", "mean_pool_usage", "allocated_bytes_at_end"),
        *("evicted_tokens", "early_compactions", "blocks_released", "swaps", "prompt_cached"),
        "code_attention",  # of results from before it went
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
    Column("KiB per sequence, mean", "kib", ",.0f"),
)
_EQUAL = (
    Column("policy", "policy", left=True),
    Column("right answers (95 % interval)", "right"),
    Column("output tok/s (all runs)", "speed"),
    Column("of `none` (all runs)", "ratio"),
    Column("MB per sequence", "mb", ".2f"),
)

_HEAD = """\
# Benchmarks

Written by `python -m bench.suite document` from [bench/results](../bench/results), which
`python -m bench.suite run` fills. The shipped model is small and its tasks are synthetic: these
figures show what the machinery gives and costs, not how the methods rank on large models.

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
| `python -m bench.cpu_attention` | GB/s that decode attention reads, beside a plain sum |
| `python -m bench.cpu_products` | matrix products on a CPU: compiled, oneDNN's, torch's |
| `python -m bench.kvpress_accuracy` | kvpress on the same prompts, as many entries kept |
| `python -m bench.repeatability` | whether a row of this page comes out the same again |

Datasets (`random`, `prefix_repetition`, `sharegpt`, `custom`, `timed_trace`), their flags, and the
JSON keys of `bench serve` and `bench latency` are named as vLLM's.
"""


def pages() -> dict[Path, str]:
    """Every page that is written from results, README.md too: its path and its text."""
    chapters = {CHAPTERS_FOLDER / f"{each.slug}.md": chapter(each) for each in CHAPTERS}
    return {PAGE: page(), README: readme(), **chapters}


def page() -> str:
    """docs/benchmarks.md: what was found, and where the tables are."""
    parts = [_HEAD.rstrip(), *_at_equal_bytes(PAGE), *_long_answers(), _contents()]
    return "\n\n".join(parts) + "\n"


def chapter(chapter: Chapter) -> str:
    """A page of sections, one per measurement."""
    file = CHAPTERS_FOLDER / f"{chapter.slug}.md"
    parts = [f"# {chapter.title}", f"{chapter.about} [All benchmarks](../benchmarks.md)."]
    return "\n\n".join([*parts, *(section(each, file) for each in chapter.measurements)]) + "\n"


def readme() -> str:
    """README.md with the newest results between its two marks: policies at equal bytes, and the
    ratios of the other long traces."""
    text = README.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    others = "\n".join(line for each in LONG[2:] if (line := _ratios(each)))
    lead = "\n\n".join([*_equal_table(), *pictures(EQUAL, README), others])
    return f"{before}{_BEGIN}{lead}\n{_END}{after}"


def _at_equal_bytes(file: Path) -> list[str]:
    text = (
        "As many bytes per sequence for every policy that evicts while decoding, long graded "
        "answers, one pool, one thread: the conditions and all columns are in "
        "[Long answers](benchmarks/long-answers.md#long-traces-graded-at-equal-bytes)."
    )
    return ["## Policies at equal bytes", text, *_equal_table(), *pictures(EQUAL, file)]


def _equal_table() -> list[str]:
    """The table of policies at equal bytes, the best first; and a line on vLLM."""
    result = EQUAL.newest()
    if result is None:
        return []
    first, *others = map(_equal_row, shortened(result["rows"]))
    others.sort(key=lambda row: -row["exact_match"])
    return [markdown_table(_EQUAL, [first, *others]), *_beside_vllm(result)]


def _equal_row(row: Row) -> dict[str, Any]:
    low, high = row["interval_95"]
    return {
        **row,
        "right": f"{row['exact_match']:.2f} ({low:.2f}–{high:.2f})",
        "speed": f"{row['output_tok_s']:,.0f} ({row['spread']})",
        "ratio": f"{row['ratio_to_first']:.2f} ({row.get('ratio_spread') or '1.00'})",
        "mb": row["mean_held_bytes"] / 1e6,
    }


def _beside_vllm(table: dict[str, Any]) -> list[str]:
    """A line; it says so if it was measured on other code than the ``table`` above it."""
    result = PEERS.newest()
    if result is None:
        return []
    rows = {row.get("policy") or row["engine"]: row for row in result["rows"]}
    said = ", ".join(f"{row['output_tok_s']:,.0f} ({name})" for name, row in rows.items())
    ratios = " and ".join(f"{rows[name]['vs_vllm']:.2f}" for name in ("none", "kara"))
    days = [each["date"][:10] for each in (result, table)]
    when = "" if days[0] == days[1] else f"; measured on {days[0]}, the table on {days[1]}"
    return [
        f"The same prompts on vLLM's CPU build, as many bytes, in turns of their own: {said} "
        f"output tok/s; `none` and Kara are {ratios} times vLLM (medians of "
        f"{result['settings']['repeat']} turns{when})."
    ]


def _long_answers() -> list[str]:
    rows = [row for each in LONG[2:] for row in _rows(each)]
    text = (
        "Random weights, since the cost does not depend on what is generated. `kara, ratio=0.3` "
        "is Kara's default until 2026-11-22, which left no [remainder](remainders.md)."
    )
    return ["## Long answers", text, markdown_table(_SUMMARY, rows)] if rows else []


def _contents() -> str:
    lines = ["## All measurements", "| | |\n|---|---|"]
    for each in CHAPTERS:
        titles = "; ".join(one.title for one in each.measurements)
        lines[-1] += f"\n| [{each.title}](benchmarks/{each.slug}.md) | {each.about} {titles} |"
    lines.append("[Rankings](rankings.md) says where our order of policies is not the papers'.")
    return "\n\n".join(lines)


def _ratios(measurement: Measurement) -> str:
    """One line: each policy's throughput over that of ``none``, with n, turns and spread.

    Where other types of cache were compared, only those: the usual type has a line of its own.
    """
    rows = [row for row in _rows(measurement) if row.get("ratio_to_first") not in (None, 1.0)]
    rows = [row for row in rows if _held_in(row) != "auto"] or rows
    if not rows:
        return ""
    said = ", ".join(f"{_spread(row)} ({_name(row)})" for row in rows)
    turns = len(rows[0].get("output_tok_s_all", ())) or 1
    runs = "one run" if turns == 1 else f"{turns} turns"
    return f"- {measurement.title} ({rows[0]['requests']} requests, {runs}): {said} times `none`."


def _spread(row: Row) -> str:
    spread = row.get("ratio_spread")
    return f"{row['ratio_to_first']:.2f}" + (f" [{spread}]" if spread else "")


def _name(row: Row) -> str:
    held = _held_in(row)
    return str(row["policy"]) if held == "auto" else f"{row['policy']} in {held}"


def _held_in(row: Row) -> str:
    return row.get("kv_cache_dtype") or "auto"


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


def pictures(measurement: Measurement, file: Path) -> list[str]:
    """Its plots, as ``file`` shows them."""
    found = sorted((PLOTS / measurement.name).glob("*.png")) if measurement.plots else []
    return [f"![{measurement.title}: {path.stem}]({relpath(path, file.parent)})" for path in found]


def section(measurement: Measurement, file: Path) -> str:
    """A section of ``file``; without a result, only the command that would make it."""
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
    return "\n\n".join(parts + pictures(measurement, file))
