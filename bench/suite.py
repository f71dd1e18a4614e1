"""The measurements of docs/benchmarks.md: `python -m bench.suite run` makes them on this machine,
`python -m bench.suite document` writes the page from the newest results in bench/results.

A run of all takes about half an hour of one core, on a machine that does nothing else meanwhile.
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvserve.benchmarks.columns import columns
from kvserve.benchmarks.report import describe_machine, markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"

KARA = "kara:window=128,buffer=16"
SNAPKV = "snapkv:trigger=threshold,budget=192,threshold=224"
PAPER = "kara:preset=paper,window=128,buffer=16,budget=50,period=32"
CHAINS = "--dataset chain --threads 1"


@dataclass(frozen=True)
class Measurement:
    """A section of the page: one command, and what a reader has to know about its figures."""

    name: str
    title: str
    text: str
    command: str
    plots: bool = False

    def argv(self, result: Path) -> list[str]:
        words = shlex.split(self.command)
        plots = ["--save-plots", str((PLOTS / self.name).relative_to(ROOT))]
        return [*words, "--save-result", str(result.relative_to(ROOT)), *plots * self.plots]

    def newest(self) -> dict[str, Any] | None:
        """The latest complete result; files are named DATE-NAME.json."""
        found = sorted(RESULTS.glob(f"????-??-??-{self.name}.json"))
        documents = [json.loads(path.read_text()) for path in found]
        complete = [each for each in documents if each["complete"] and "columns" in each]
        return complete[-1] if complete else None


SUITE = (
    Measurement(
        "quarter-pool",
        "A pool of a quarter of the demand",
        "The regime that compression is for: 100 chains of 30 sums want four times the blocks that "
        "there are. Ratios are medians over turns, each beside the first row of the same turn.",
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 0.25 --repeat 3 --policy none "
        f"--policy {SNAPKV} --policy {KARA}",
    ),
    Measurement(
        "pool-sweep",
        "Which pools pay: the crossover",
        "The same traffic on pools from a fifth of the demand to more than all of it.",
        f"bench sweep {CHAINS} --num-prompts 48 --pool-shares 0.2 0.35 0.5 0.75 1.0 1.5 "
        f"--repeat 3 --policy {SNAPKV} --policy {KARA}",
        plots=True,
    ),
    Measurement(
        "ample-pool",
        "A pool with room for everybody",
        "Where compression has nothing to give but less attention, and its events to cost.",
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 2 --repeat 5 --policy none "
        f"--policy {KARA}",
    ),
    Measurement(
        "shared-prefixes",
        "Shared prompts, prefix caching off and on",
        "100 prompts of 576 tokens, of which 512 are one of five; caching stays on under Kara.",
        "bench throughput --dataset prefix_repetition --prefix-repetition-prefix-len 512 "
        "--prefix-repetition-suffix-len 64 --prefix-repetition-num-prefixes 5 "
        "--prefix-repetition-output-len 128 --num-prompts 100 --pool-share 0.5 --repeat 3 "
        "--threads 1 --compare-prefix-caching --policy none "
        "--policy kara:window=64,buffer=16,ratio=0.3",
    ),
    Measurement(
        "batch-sizes",
        "More sequences at once",
        "The shape of the Kara paper's Tables 2 and 3: the same pool, 16 to 64 sequences allowed.",
        f"bench sweep {CHAINS} --num-prompts 64 --pool-shares 0.25 --max-num-seqs 16 32 64 "
        f"--repeat 3 --policy {SNAPKV} --policy {PAPER} --policy {KARA}",
    ),
    Measurement(
        "chain-accuracy",
        "Accuracy against retention, reasoning step by step",
        "Policies that compress while decoding, on chains of 30 sums. Budgets in tokens are of the "
        "whole sequence (525 tokens), ratios of every window.",
        "eval --tasks chain --num-samples 60 --threads 1 --retention 0.2 0.3 0.4 0.5 0.6 "
        f"--policy {KARA} "
        + " ".join(
            f"--policy {name}:budget={budget}{more}"
            for budget in (157, 262)
            for name, more in (
                ("streaming_llm", ""),
                ("h2o", ""),
                ("rkv", ""),
                ("snapkv", f",trigger=threshold,threshold={budget + 32},protect_prompt=false"),
            )
        ),
        plots=True,
    ),
    Measurement(
        "needles",
        "Needles by depth and length",
        "One secret number among eight, at five depths of texts of 256 to 2,048 tokens; policies "
        "that compress the prompt before the question's answer.",
        "eval --tasks needle-grid --num-samples 8 --threads 1 --retention 0.1 0.2 0.4 "
        "--policy snapkv --policy chunkkv --policy keydiff --policy streaming_llm:budget=256",
        plots=True,
    ),
    Measurement(
        "latency",
        "One batch from end to end",
        "No pressure, no queue: what a policy adds to the time of eight requests.",
        "bench latency --input-len 64 --output-len 256 --batch-size 8 --num-iters 10 "
        f"--num-iters-warmup 2 --threads 1 --policy none --policy {SNAPKV} --policy {KARA}",
    ),
)
_HEAD = """\
# Benchmarks

Written by `python -m bench.suite document` from [bench/results](../bench/results), which
`python -m bench.suite run` fills; [measurements.md](measurements.md) says what it means. The
shipped model has 1 M parameters and synthetic tasks: these figures show what the machinery gives
and costs, not how the methods rank on large models.

Every throughput is output tokens over wall time. Rows of one table ran in one process, in turns;
a ratio is the median of those within each turn.

Yours is measured by the same commands with `--model`:

| command | what it says |
|---|---|
| `kvserve bench sweep` | below which pool a policy beats the full cache, where it loses |
| `kvserve bench throughput` | policies, prefix caching, transformers, on one pool |
| `kvserve bench latency` | one batch from end to end |
| `kvserve bench policies` | one event, in decode steps |
| `kvserve bench serve` | a server from outside, open-loop; also another's, as vLLM's |
| `kvserve eval` | accuracy: shipped tasks, needles, files of GSM8K, MATH, AIME, RULER |

Datasets (`random`, `prefix_repetition`, `sharegpt`, `custom`, `timed_trace`), their flags, and the
JSON keys of `bench serve` and `bench latency` are named as vLLM's.
"""


def run(measurement: Measurement) -> int:
    date = datetime.now(timezone.utc).date().isoformat()
    argv = measurement.argv(RESULTS / f"{date}-{measurement.name}.json")
    sys.stdout.write(f"\n{measurement.name}: kvserve {shlex.join(argv)}\n")
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "kvserve", *argv], cwd=ROOT).returncode


def section(measurement: Measurement) -> str:
    """A section of the page; without a result, only the command that would make it."""
    parts = [f"## {measurement.title}", measurement.text]
    result = measurement.newest()
    command = f"kvserve {measurement.command}" if result is None else result["command"]
    parts.append(f"```\n{command}\n```")
    if result is None:
        return "\n\n".join([*parts, "Not measured yet."])
    parts += [f"{line}." for line in (*result["about"], describe_machine(result), result["date"])]
    parts.append(markdown_table(columns(*result["columns"]), result["rows"]))
    parts += [f"- {note}" for note in result["notes"]]
    if measurement.plots:
        pictures = sorted((PLOTS / measurement.name).glob("*.png"))
        parts += [f"![{path.stem}]({path.relative_to(PAGE.parent)})" for path in pictures]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [measurement.name for measurement in SUITE]
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}")
    commands.add_parser("document", help="write docs/benchmarks.md")
    args = parser.parse_args()
    if args.command == "document":
        PAGE.write_text("\n\n".join([_HEAD.rstrip(), *map(section, SUITE)]) + "\n")
        return
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = [each.name for each in SUITE if each.name in (args.names or names) and run(each)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
