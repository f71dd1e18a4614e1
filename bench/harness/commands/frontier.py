"""``kvserve bench frontier``: what a byte of the cache buys, in fidelity and in speed.

`kvserve eval --fidelity` on a text (on all cores) and `kvserve bench throughput` on a pool of a
quarter of the demand, one after the other, each in a process of its own; here their rows are
joined. Rows are the full cache in fewer bits, policies that drop, and both. `kvserve tune
--frontier FILE --kl X` chooses one of them; `kvserve --policy auto` does at its start, from the
file that this command saves for the model if none is named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.reports.plots import plot_frontier
from bench.harness.reports.report import Column, Report, Row, columns, measure_and_publish
from bench.harness.setup.options import add_report_arguments, at_least, check_matplotlib
from bench.harness.setup.policy_spec import policy_spec
from kvserve.log import ConfigError
from kvserve.measured import usual_file

FULL = ("none", "none@int8", "none@k8v4", "none@k4v4", "none@3bit")
DROPPING = ("kara@k8v4", "kara", "kara:ratio=0.1@k8v4", "kara:ratio=0.5@k8v4")
OTHERS = (
    "streaming_llm:period=32@k8v4",
    *(f"{name}:trigger=threshold,query_reduce=group_mean@k8v4" for name in ("snapkv", "chunkkv")),
)
"""Each with the budget that holds the bytes of the first of ``DROPPING``. Means over groups of
heads fill a block's log whatever the number of heads is."""
_PLACE = Path(__file__).resolve().parents[3]
_RUN = """\
import runpy, sys
sys.path[0] = sys.argv.pop(1)
runpy.run_module("kvserve", run_name="__main__", alter_sys=True)
"""
"""``python -m kvserve``, which finds packages where this one is, and not in the working folder."""
_COLUMNS = (
    *columns("policy", "kv_cache_dtype", "of_full", "kl", "kl_error", "facts"),
    *columns("output_tok_s", "ratio_to_first", "n"),
    Column("nothing smaller is closer", "frontier", left=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    words = "directory, hub id or GGUF file (default: smollm2, see `kvserve fetch`)"
    parser.add_argument("--model", default="smollm2", metavar="M", help=words)
    words = "a text file (default: Python's own documentation)"
    parser.add_argument("--text", type=Path, metavar="FILE", help=words)
    words = f"beside {', '.join(FULL)} (default: {' '.join(DROPPING)})"
    parser.add_argument("--policy", type=policy_spec, action="append", metavar="SPEC", help=words)
    words = f"at as many bytes as --policy's first (default: {' '.join(OTHERS)})"
    parser.add_argument("--other", type=policy_spec, action="append", metavar="SPEC", help=words)
    for name, usual, words in (
        ("num-texts", 8, "texts"),
        ("text-len", 3000, "tokens of each text"),
        ("num-prompts", 12, "answers for speed"),
        ("output-len", 3000, "tokens of each answer"),
        ("threads", 1, "torch threads while speed is measured"),
    ):
        words = f"{words} (default: {usual})"
        parser.add_argument(f"--{name}", type=at_least(1), default=usual, metavar="N", help=words)
    words = "dtype of the model and of entries as they are computed (default: bfloat16)"
    parser.add_argument("--dtype", default="bfloat16", metavar="DTYPE", help=words)
    add_report_arguments(parser, plots="the figure")
    parser.set_defaults(fail=parser.error)


def run(args: argparse.Namespace) -> int:
    check_matplotlib(args)
    if args.save_result is None and (file := usual_file(args.model)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        args.save_result = file
    return measure_and_publish(Frontier(args), args)


class Frontier:
    """The measurement; a subclass may add rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._commands: list[str] = []

    def measure(self) -> None:
        args = self.args
        dropping = [spec.label for spec in args.policy or map(policy_spec, DROPPING)]
        others = [spec.label for spec in args.other or map(policy_spec, OTHERS)]
        texts = ["--text", args.text] if args.text else []
        sizes = ["--num-samples", args.num_texts, "--text-len", args.text_len, "--facts", 5]
        fidelity = ["eval", "--fidelity", *texts, *sizes, "--threads", os.cpu_count()]
        found = self._kvserve(*fidelity, *_policies([*FULL, *dropping]))
        matched = [*_policies([dropping[0], *others]), "--match-bytes"]
        matched.append(dropping[0].partition("@")[0])
        found += self._kvserve(*fidelity, *matched)[2:]
        traffic = ["--input-len", 64, "--output-len", args.output_len, "--pool-shares", 0.25]
        bench = ["bench", "throughput", "--num-prompts", args.num_prompts, *traffic]
        ran = [f"{row['policy']}@{row['kv_cache_dtype']}" for row in found]
        speeds = self._kvserve(*bench, *_policies(ran), "--threads", args.threads)
        self.rows += joined(found, speeds)

    def _kvserve(self, *words: Any) -> list[Row]:
        """The rows of a command of kvserve."""
        args = self.args
        given = [*map(str, words), "--model", str(args.model), "--dtype", args.dtype]
        self._commands.append(" ".join(["kvserve", *given]))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "result.json")
            command = [sys.executable, "-c", _RUN, str(_PLACE), *given, "--save-result", str(file)]
            done = subprocess.run(command, check=False)
            if done.returncode:
                raise ConfigError(f"`{self._commands[-1]}` ended with status {done.returncode}")
            rows: list[Row] = json.loads(file.read_text())["rows"]
        return rows

    def report(self) -> Report:
        args = self.args
        about = [
            f"{args.model}, {args.num_texts} texts of {args.text_len:,} tokens; "
            f"{args.num_prompts} answers of {args.output_len:,} tokens on a pool of a quarter of "
            f"the demand; {args.dtype}; KL in nats a token, over second halves"
        ]
        names = ("model", "num_texts", "text_len", "num_prompts", "output_len", "threads", "dtype")
        settings = {name: getattr(args, name) for name in names}
        settings |= {"text": args.text and str(args.text), "commands": self._commands}
        drawn = args.save_plots and self.rows
        plots = plot_frontier(self.rows, args.save_plots) if drawn else []
        return Report("frontier", about, _COLUMNS, self.rows, settings, self.notes, plots=plots)


def joined(found: Sequence[Row], speeds: Sequence[Row]) -> list[Row]:
    """Fidelity and speed of the same policies and forms, and whether no other row holds fewer bytes
    and is closer to the full cache. A ratio is to the full cache of the same run."""
    by_setting = {(row["policy"], row.get("kv_cache_dtype") or "auto"): row for row in speeds}
    rows: list[Row] = []
    for row in found:
        speed = by_setting[row["policy"], row["kv_cache_dtype"]]
        beaten = any(each["of_full"] <= row["of_full"] and each["kl"] < row["kl"] for each in found)
        rows.append(
            {name: value for name, value in row.items() if name != "curve"}
            | {name: speed[name] for name in ("output_tok_s", "ratio_to_first")}
            | {"frontier": "" if beaten else "yes"}
        )
    return rows


def flags(row: Row) -> str:
    """What to start the server with for a row."""
    fields = dict(row["policy_args"])
    words = [f"--policy {fields.pop('name')}"]
    words += [f"--policy.{name} {value}" for name, value in fields.items()]
    if row["kv_cache_dtype"] != "auto":
        words.append(f"--kv-cache-dtype {row['kv_cache_dtype']}")
    return " ".join(words)


def _policies(specs: Sequence[str]) -> list[str]:
    return [word for spec in specs for word in ("--policy", spec)]
