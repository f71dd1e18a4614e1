"""The measurements of docs/benchmarks.md: `python -m bench.suite run` makes them on this machine,
`python -m bench.suite document` writes the page from the newest results in bench/results.

`python -m bench.suite list` says how long each takes on one core of a machine that does nothing
else meanwhile. What stands in docs/rankings.md is written by hand, and becomes a part of the page.
"""

import argparse
import importlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvserve.benchmarks.columns import columns
from kvserve.benchmarks.report import Column, describe_machine, markdown_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "bench" / "results", ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
BY_HAND = ROOT / "docs" / "rankings.md"

KARA = "kara:window=128,buffer=16"
SNAPKV = "snapkv:trigger=threshold,budget=192,threshold=224"
PAPER = "kara:preset=paper,window=128,buffer=16,budget=50,period=32"
CHAINS = "--dataset chain --threads 1"

# Every decoding policy on equal terms: the prompt's 191 entries and a share of the chain's 334.
RETENTIONS = (0.2, 0.3, 0.4, 0.5, 0.6)
_PROMPT, _TRACE = 191, 334
_PROTECTING = ("snapkv", "keydiff", "chunkkv", "pyramidkv", "adakv")


def decoding_policies(retention: float) -> list[str]:
    """Those that know how to leave the prompt alone do; the others count it as any text."""
    kept = round(retention * _TRACE)
    bound = f"budget={kept},threshold={kept + 32},protect_prompt=true"
    return [
        *(f"{name}:trigger=threshold,{bound}" for name in _PROTECTING),
        f"rkv:{bound}",
        *(f"{name}:budget={_PROMPT + kept}" for name in ("streaming_llm", "h2o")),
    ]


def flags(policies: Iterable[str]) -> str:
    return " ".join(f"--policy {policy}" for policy in policies)


@dataclass(frozen=True)
class Measurement:
    """A section of the page: one command, and what a reader has to know about its figures.

    The command is kvserve's, or a ``module``'s under bench; ``minutes`` are those of one idle core.
    """

    name: str
    title: str
    text: str
    command: str
    minutes: float
    plots: bool = False
    module: str | None = None

    @property
    def program(self) -> str:
        return f"python -m {self.module}" if self.module else "kvserve"

    @property
    def words(self) -> list[str]:
        """What is run, without where its results go."""
        return [sys.executable, "-m", self.module or "kvserve", *shlex.split(self.command)]

    def argv(self, result: Path) -> list[str]:
        words = shlex.split(self.command)
        plots = ["--save-plots", str((PLOTS / self.name).relative_to(ROOT))]
        return [*words, "--save-result", str(result.relative_to(ROOT)), *plots * self.plots]

    def table(self, keys: Sequence[str]) -> tuple[Column, ...]:
        """The columns of these keys."""
        if self.module is None:
            return columns(*keys)
        own = {column.key: column for column in importlib.import_module(self.module).COLUMNS}
        return tuple(own[key] for key in keys)

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
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 0.25 --repeat 9 --policy none "
        f"--policy {SNAPKV} --policy {KARA}",
        minutes=3,
    ),
    Measurement(
        "pool-sweep",
        "Which pools pay: the crossover",
        "The same traffic on pools from a fifth of the demand to more than all of it.",
        f"bench sweep {CHAINS} --num-prompts 48 --pool-shares 0.2 0.35 0.5 0.75 1.0 1.5 "
        f"--repeat 3 --policy {SNAPKV} --policy {KARA}",
        minutes=4,
        plots=True,
    ),
    Measurement(
        "ample-pool",
        "A pool with room for everybody",
        "Where compression has nothing to give but less attention, and its events to cost.",
        f"bench throughput {CHAINS} --num-prompts 100 --pool-share 2 --repeat 5 --policy none "
        f"--policy {KARA}",
        minutes=1.5,
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
        minutes=1.5,
    ),
    Measurement(
        "batch-sizes",
        "More sequences at once",
        "The shape of the Kara paper's Tables 2 and 3: one pool, 16 to 256 sequences allowed at "
        "once. Up to 64 of them the pool has room for all; beyond, memory is what bounds.",
        f"bench sweep {CHAINS} --num-prompts 256 --pool-shares 0.25 "
        f"--max-num-seqs 16 32 64 128 256 --repeat 2 " + flags((SNAPKV, PAPER, KARA)),
        minutes=12,
        plots=True,
    ),
    Measurement(
        "chain-accuracy",
        "Accuracy against retention, reasoning step by step",
        "Every policy that compresses while decoding, on chains of 30 sums: a prompt of about 191 "
        "tokens, a trace of 334. All but Kara hold the prompt's count and 20 to 60 % of the "
        "trace's (up to 32 entries more between events); Kara keeps as much of each full window. "
        "StreamingLLM and H2O cannot leave the prompt alone, and count it in.",
        "eval --tasks chain --num-samples 100 --threads 1 --retention "
        f"{' '.join(map(str, RETENTIONS))} "
        + flags((KARA, *(policy for r in RETENTIONS for policy in decoding_policies(r)))),
        minutes=8,
        plots=True,
    ),
    Measurement(
        "kara-ablations",
        "What Kara is made of",
        "The two ablations of the Kara paper's Table 1 at its retention of 40 %: only the "
        "buffer's queries score, and no Token2Chunk (`chunk_budget=0`). First with our scores, "
        "then with the paper's (all heads' queries computed again, attention summed).",
        "eval --tasks chain redundant-chain --num-samples 100 --threads 1 "
        + flags(
            KARA + ",ratio=0.4" + scores + ablation
            for scores in ("", ",query_source=recompute,query_reduce=heads,query_aggregate=sum")
            for ablation in ("", ",queries=buffer", ",chunk_budget=0")
        ),
        minutes=3,
    ),
    Measurement(
        "needles",
        "Needles by depth and length",
        "One secret number among eight, at five depths of texts of 256 to 2,048 tokens, as in "
        "ChunkKV's tables; policies cut the prompt, question included, to so many entries before "
        "the answer.",
        "eval --tasks needle-grid --num-samples 8 --threads 1 "
        + flags(
            f"{name}:budget={budget}{more}"
            for budget in (64, 128)
            for name, more in (
                *(("chunkkv", ""), ("pyramidkv", ""), ("snapkv", ""), ("keydiff", "")),
                *(("h2o", ",decode_update=false"), ("streaming_llm", "")),
            )
        ),
        minutes=4,
        plots=True,
    ),
    Measurement(
        "needles-codes",
        "Needles under SpindleKV",
        "The same grid; a ratio of the prompt's entries is left by eviction. SpindleKV then holds "
        "them as codes, PyramidKV as they are: columns say at how many bytes.",
        "eval --tasks needle-grid --num-samples 8 --threads 1 "
        + flags(
            (
                *(f"spindlekv:ratio={ratio}" for ratio in (1, 0.4, 0.2)),
                *(f"pyramidkv:ratio={ratio}" for ratio in (0.4, 0.2)),
            )
        ),
        minutes=4,
        plots=True,
    ),
    Measurement(
        "codes-accuracy",
        "Codes beside eviction at as many bytes",
        "SpindleKV without its eviction, and PyramidKV at the ratio that holds as many bytes of "
        "blocks at the end: 0.57 on chains, 0.42 on needles, 0.95 on recall. Bytes are those of "
        "all blocks that a request named, mean over requests. With `gqa=repeat` every query head "
        "keeps as many entries for itself, and what any of them keeps is held.",
        "eval --tasks chain needle-512 recall --num-samples 40 --threads 1 "
        + flags(
            (
                *("spindlekv:ratio=1", "spindlekv:ratio=0.8", "spindlekv:ratio=0.8,gqa=repeat"),
                *(f"pyramidkv:ratio={ratio}" for ratio in (0.95, 0.57, 0.42)),
            )
        ),
        minutes=1,
    ),
    Measurement(
        "codes",
        "Codes read and rebuilt",
        "Eight sequences of 1,024 random tokens that go on for 512: attention that reads codes "
        "itself (direct) beside entries rebuilt in each step. `itl p50` is a decoding step; the "
        "throughput has the events in it too, of which the one at a prompt's end compares all its "
        "entries with each other. The paper decodes 17 to 18 % slower than the full cache "
        "(4,096 + 1,000 tokens, 40 % of the cache, RTX 3090).",
        "bench throughput --dataset random --input-len 1024 --output-len 512 --num-prompts 8 "
        "--max-num-seqs 8 --threads 1 --repeat 3 --compare-code-attention "
        + flags(("none", "spindlekv:ratio=1", "spindlekv:ratio=0.4")),
        minutes=2,
    ),
    Measurement(
        "latency",
        "One batch from end to end",
        "No pressure, no queue: what a policy adds to the time of eight requests.",
        "bench latency --input-len 64 --output-len 256 --batch-size 8 --num-iters 10 "
        f"--num-iters-warmup 2 --threads 1 --policy none --policy {SNAPKV} --policy {KARA}",
        minutes=1,
    ),
    Measurement(
        "cpu-peers",
        "Other engines on the same CPU",
        "Output tokens per second of kvserve (compiled attention in each layout of its cache, "
        "torch's attention) and of its peers, each in an environment of its own "
        "(`make peers`), on the same random weights. `kvserve / it` compares with the best peer. "
        "transformers' continuous batching takes part if `--contestants` names it.",
        "--repeat 3",
        minutes=13,
        module="bench.cpu_peers",
    ),
    Measurement(
        "kvpress-accuracy",
        "kvpress's presses on the same prompts",
        "The same method in kvpress and here, keeping as many entries: at a prompt's end, and "
        "while decoding every 32 steps. Every turn of a task is a prompt of its own.",
        "--threads 1",
        minutes=6,
        module="bench.kvpress_accuracy",
    ),
    Measurement(
        "repeatability",
        "The same again",
        "The first section's command three times over: what was decided must not change, ratios "
        "of throughputs may spread by 5 %.",
        "quarter-pool --times 3",
        minutes=9,
        module="bench.repeatability",
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
| `kvserve eval` | accuracy: shipped tasks, needles, files of GSM8K, MATH, AIME, RULER, LongBench |
| `python -m bench.cpu_peers` | vLLM, llama.cpp and transformers on the same CPU (`make peers`) |
| `python -m bench.cpu_products` | matrix products on a CPU: compiled, oneDNN's, torch's |
| `python -m bench.kvpress_accuracy` | kvpress on the same prompts, as many entries kept |
| `python -m bench.repeatability` | whether a row of this page comes out the same again |

Datasets (`random`, `prefix_repetition`, `sharegpt`, `custom`, `timed_trace`), their flags, and the
JSON keys of `bench serve` and `bench latency` are named as vLLM's.
"""


def run(measurement: Measurement) -> int:
    date = datetime.now(timezone.utc).date().isoformat()
    argv = measurement.argv(RESULTS / f"{date}-{measurement.name}.json")
    sys.stdout.write(f"\n{measurement.name}: {measurement.program} {shlex.join(argv)}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", measurement.module or "kvserve", *argv]
    return subprocess.run(command, cwd=ROOT).returncode


def page() -> str:
    """The whole of docs/benchmarks.md."""
    by_hand = BY_HAND.read_text().rstrip()
    return "\n\n".join([_HEAD.rstrip(), *map(section, SUITE), by_hand]) + "\n"


def section(measurement: Measurement) -> str:
    """A section of the page; without a result, only the command that would make it."""
    parts = [f"## {measurement.title}", measurement.text]
    result = measurement.newest()
    planned = f"{measurement.program} {measurement.command}"
    command = planned if result is None else result["command"]
    parts.append(f"```\n{command}\n```")
    if result is None:
        return "\n\n".join([*parts, "Not measured yet."])
    parts += [f"{line}." for line in (*result["about"], describe_machine(result), result["date"])]
    parts.append(markdown_table(measurement.table(result["columns"]), result["rows"]))
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
    commands.add_parser("list", help="say how long each takes, and whether it was measured")
    args = parser.parse_args()
    if args.command == "document":
        PAGE.write_text(page())
        return
    if args.command == "list":
        for each in SUITE:
            measured = "measured" if each.newest() else "not measured yet"
            sys.stdout.write(f"{each.name:18} {each.minutes:4g} min  {measured}\n")
        return
    unknown = set(args.names) - set(names)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = [each.name for each in SUITE if each.name in (args.names or names) and run(each)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
