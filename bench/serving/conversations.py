"""Agents' conversations on one server after the other, on a pool that is too small for them.

    python -m bench.serving.conversations            # a 4 M-parameter shape with random weights

The servers run `none` with its prefix cache, Kara without continuations, and Kara with them. Each
has the same number of blocks, and one thread for its engine. All conversations of a row run at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness.datasets.datasets import conversations
from bench.harness.datasets.workload import (
    DEFAULT_BLOCK_SIZE,
    Conversations,
    Source,
    blocks_at_once,
)
from bench.harness.reports.report import Column, Report, Row, measure_and_publish
from bench.harness.setup.checkpoint import SHAPES
from bench.harness.setup.options import add_report_arguments
from bench.soak.served import Served

COLUMNS = (
    Column("policy", "policy", left=True),
    Column("continuations", "continuations", left=True),
    Column("conversations", "conversations", "d"),
    Column("TTFT p50, later turns, ms", "median_follow_up_ttft_ms", ",.0f"),
    Column("p99", "p99_follow_up_ttft_ms", ",.0f"),
    Column("prompt tokens computed", "prompt_tokens_computed", ",d"),
    Column("turns that went on", "resumed_turns", "d"),
    Column("of turns", "completed", "d"),
    Column("output tok/s", "output_throughput", ",.0f"),
    Column("mean running", "mean_running", ".1f"),
    Column("preemptions", "preemptions", "d"),
)
_TOKENIZER = "kvserve/tiny"
"""Prompts use its token ids; the model's vocabulary is larger."""
_ARMS = "none", "policy", "continuations"
_LENGTHS = "min_turns", "max_turns", "min_tool_len", "max_tool_len"
_TURNS = {"system_len": 512, "question_len": 64, "answer_len": 128, "think_seconds": 2.0}


class Talks:
    """A row for each of ``arms`` and each number of conversations."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rows: list[Row] = []
        self._num_blocks = 0

    def measure(self) -> None:
        args = self._args
        demand = blocks_at_once(self._talks(args.conversations[0]), DEFAULT_BLOCK_SIZE)
        self._num_blocks = int(args.pool_share * demand)
        arms = {"none": ("none", "off"), "policy": (args.policy, "off")}
        arms["continuations"] = (args.policy, "on")
        runs = [(*arms[name], count) for count in args.conversations for name in args.arms]
        with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
            Path(scratch, "config.json").write_text(json.dumps(SHAPES[args.shape]))
            for policy, continuations, count in tqdm(
                runs, unit="run", disable=True if args.disable_tqdm else None
            ):
                row = self._talk(Path(scratch), policy, continuations, count)
                self._rows.append(row)

    def report(self) -> Report:
        args = self._args
        about = [
            f"conversations of {args.min_turns} to {args.max_turns} turns on shape {args.shape}, "
            f"random weights: a system prompt of {_TURNS['system_len']} tokens that all share, "
            f"tool outputs of {args.min_tool_len} to {args.max_tool_len}, answers of "
            f"{_TURNS['answer_len']}, {_TURNS['think_seconds']:g} s to think on average",
            f"pool of {self._num_blocks:,} blocks of {DEFAULT_BLOCK_SIZE} tokens, "
            f"{args.pool_share:g} of what {args.conversations[0]} conversations want at their end",
            *([f"{args.swap_space:g} GiB of host memory"] if args.swap_space is not None else []),
        ]
        names = "shape", "pool_share", "swap_space", "seed", "policy", *_LENGTHS
        settings = {name: getattr(args, name) for name in names}
        settings |= {"num_blocks": self._num_blocks, **_TURNS}
        program = "python -m bench.serving.conversations"
        return Report("conversations", about, COLUMNS, self._rows, settings, program=program)

    def _talks(self, count: int) -> Conversations:
        options = {**vars(self._args), **_TURNS}
        vocab = SHAPES[self._args.shape]["vocab_size"]
        return conversations(Source(count, self._args.seed, vocab, None, None, True, options))

    def _talk(self, model: Path, policy: str, continuations: str, count: int) -> Row:
        flags = ["--model", str(model), "--load-format", "dummy", "--tokenizer", _TOKENIZER]
        flags += ["--dtype", "bfloat16", "--num-gpu-blocks-override", str(self._num_blocks)]
        flags += ["--policy", policy, "--continuations", continuations]
        if self._args.swap_space is not None:
            flags += ["--swap-space", str(self._args.swap_space)]
        server = Served([*flags, "--disable-uvicorn-access-log"], {"OMP_NUM_THREADS": "1"})
        server.start()
        try:
            found = self._client(server.url, count)
        finally:
            server.stop()
        return {
            **{"policy": policy, "continuations": continuations, "conversations": count},
            **{key: value for key, value in found.items() if not isinstance(value, list | dict)},
        }

    def _client(self, url: str, count: int) -> dict[str, Any]:
        """The JSON result of `kvserve bench serve`."""
        args = self._args
        words = f"bench serve --base-url {url} --backend openai --dataset conversations "
        words += f"--tokenizer {_TOKENIZER} --num-prompts {count} --max-concurrency {count} "
        words += f"--seed {args.seed} --num-warmups 0 --disable-tqdm "
        options = {**{name: getattr(args, name) for name in _LENGTHS}, **_TURNS}
        words += " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items())
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            command = [sys.executable, "-m", "kvserve", *shlex.split(words)]
            command += ["--save-result", str(result)]
            env = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
            found: dict[str, Any] = json.loads(result.read_text())
        return found


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_report_arguments(parser)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4m", help="default: 4m")
    words = "conversations at once; the first value sets the pool size (default: 8 16)"
    parser.add_argument(
        "--conversations", type=int, nargs="+", default=[8, 16], metavar="N", help=words
    )
    parser.add_argument("--policy", default="kara", help="beside none (default: kara)")
    words = "of what the first number of conversations wants (default: 0.25)"
    parser.add_argument("--pool-share", type=float, default=0.25, metavar="X", help=words)
    words = "GiB of host memory for caches that leave the pool (default: the server's)"
    parser.add_argument("--swap-space", type=float, metavar="GIB", help=words)
    words = "which servers: none, the policy, the policy with continuations (default: all)"
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=list(_ARMS), help=words)
    for name, default in (("turns", (8, 20)), ("tool-len", (200, 2000))):
        for bound, value in zip(("min", "max"), default, strict=True):
            parser.add_argument(f"--{bound}-{name}", type=int, default=value, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    sys.exit(measure_and_publish(Talks(args), args))


if __name__ == "__main__":
    main()
