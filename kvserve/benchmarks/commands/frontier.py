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
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvserve.benchmarks.reports.plots import plot_frontier
from kvserve.benchmarks.reports.report import Column, Report, Row, columns, measure_and_publish
from kvserve.benchmarks.setup.options import add_report_arguments, at_least, check_matplotlib
from kvserve.benchmarks.setup.policy_spec import policy_spec
from kvserve.fields import did_you_mean, number_wanted
from kvserve.folders import cache_folder
from kvserve.log import ConfigError

AUTO_KL = 0.05
"""How far from the full cache `--policy auto` may go, in nats a token, if nothing is said."""
FULL = ("none", "none@int8", "none@k8v4", "none@k4v4", "none@3bit")
DROPPING = ("kara@k8v4", "kara", "kara:ratio=0.1@k8v4", "kara:ratio=0.5@k8v4")
OTHERS = (
    "streaming_llm:period=32@k8v4",
    *(f"{name}:trigger=threshold,query_reduce=group_mean@k8v4" for name in ("snapkv", "chunkkv")),
)
"""Each with the budget that holds the bytes of the first of ``DROPPING``. Means over groups of
heads fill a block's log whatever the number of heads is."""
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
            done = subprocess.run(
                [sys.executable, "-m", "kvserve", *given, "--save-result", str(file)], check=False
            )
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


def usual_file(model: str) -> Path | None:
    """Where a model's frontier is saved if no file is named; ``None`` without a home."""
    folder, name = cache_folder(), re.sub(r"[^\w.-]+", "-", str(model)).strip("-")
    return folder and folder / "frontiers" / f"{name}.json"


def chosen(
    file: Path,
    kl: float | None = None,
    of_full: float | None = None,
    speed: float | None = None,
    dtype: str | None = None,
) -> tuple[Row, list[str]]:
    """The row of a saved frontier within these bounds: the fastest if ``kl`` is one, else the
    closest to the full cache; and lines that say what was measured. ``ConfigError`` if there is
    none, or if the file is no frontier."""
    try:
        document = json.loads(file.read_text())
        fit = [
            row
            for row in document["rows"]
            if row["policy_args"]
            and row["ratio_to_first"]  # of kvserve, and measured
            and (kl is None or row["kl"] <= kl)
            and (of_full is None or row["of_full"] <= of_full)
            and (speed is None or row["ratio_to_first"] >= speed)
            and (dtype is None or row["kv_cache_dtype"] == dtype)
        ]
        about, machine = document["about"], document["device"]["name"]
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{file} is no result of `kvserve bench frontier`") from None
    if not fit:
        raise ConfigError("nothing that was measured is within these bounds; loosen one")
    row = min(fit, key=lambda row: row["kl"] if kl is None else -row["ratio_to_first"])
    facts = f"KL {row['kl']:.4f}, {row['of_full']:.2f} of the full cache's bytes, "
    facts += f"{row['ratio_to_first']:.2f} times its output tokens per second ({machine})"
    return row, [*about, facts]


def automatic(model: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What the model's frontier says instead of a ``policy`` that is ``auto`` in flat settings,
    and why, in a sentence.

    ``policy_args`` may have ``kl`` and ``frontier`` (a file). A type of cache that is given is
    kept. Raises ``ConfigError``, above all if nothing was measured.
    """
    args = dict(values.get("policy_args", {}))
    kl, named = args.pop("kl", AUTO_KL), args.pop("frontier", None)
    if args:
        name = next(iter(args))
        close = did_you_mean(name, ("kl", "frontier"))
        raise ConfigError(f"--policy.{name}: auto has kl and frontier alone{close}")
    if (wanted := number_wanted(kl, float, above=0)) is not None:
        raise ConfigError(f"--policy.kl must be {wanted}, got {kl!r}")
    file = usual_file(model) if named is None else Path(str(named))
    if named is None and not (file and file.exists()):
        raise ConfigError(
            f"--policy auto chooses from what was measured of {model}, and nothing was: "
            f"`kvserve bench frontier --model {model}` does, in an hour or so"
        )
    assert file is not None
    dtype = values.get("kv_cache_dtype")
    try:
        row, facts = chosen(file, kl, dtype=dtype)
    except ConfigError as error:
        raise ConfigError(f"--policy auto: {error}") from None
    fields = dict(row["policy_args"])
    setting = {"policy": fields.pop("name"), "policy_args": fields}
    setting["kv_cache_dtype"] = row["kv_cache_dtype"]
    return setting, f"chosen by auto for a KL of at most {kl:g}: {facts[-1]}"


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
