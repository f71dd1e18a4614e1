"""Results as Markdown: a section for each measurement, a page for each chapter of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from bench.equal_bytes import equal_bytes_table
from bench.harness.reports.plots import short_names
from bench.harness.reports.report import Row, describe_machine, markdown_table
from bench.report.measurements import CHAPTERS, PLOTS, Chapter, Measurement

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


def chapters() -> dict[str, str]:
    """The pages under docs/ that `make docs-site` builds from results, by their path."""
    return {f"benchmarks/{each.slug}.md": chapter(each) for each in CHAPTERS}


def chapter(chapter: Chapter) -> str:
    """A page of sections, one per measurement."""
    parts = [f"# {chapter.title}", f"{chapter.about} [The tables that decide](../benchmarks.md)."]
    for each in chapter.measurements:
        parts += [section(each), *pictures(each)]
    return "\n\n".join(parts) + "\n"


def section(measurement: Measurement) -> str:
    """The newest result of a measurement."""
    result = measurement.newest()
    parts = [f"## {measurement.title}", *filter(None, [measurement.text])]
    parts.append(f"```\n{shlex.join(measurement.words)}\n```")
    parts += [f"{line}." for line in (*result["about"], describe_machine(result), result["date"])]
    keys = [key for key in result["columns"] if key not in _LEFT_OUT]
    parts.append(markdown_table(measurement.table(keys), shortened(result["rows"])))
    parts += [f"- {note}" for note in result["notes"]]
    if measurement.equal_bytes and (table := equal_bytes_table(result["rows"])):
        parts += [_EQUAL_BYTES, table]
    return "\n\n".join(parts)


def shortened(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows with short names of policies; the command above a table has their arguments."""
    names = short_names(row["policy_args"] for row in rows if row.get("policy_args"))
    return [{**row, "policy": names.get(row.get("policy", ""), row.get("policy"))} for row in rows]


def pictures(measurement: Measurement) -> list[str]:
    """Its plots, as a page of its chapter shows them."""
    found = sorted((PLOTS / measurement.name).glob("*.png")) if measurement.plots else []
    folder = f"../{PLOTS.name}/{measurement.name}"
    return [f"![{measurement.title}: {path.stem}]({folder}/{path.name})" for path in found]
