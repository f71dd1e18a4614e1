"""``kvserve bench latency``: how long one batch takes from its prompts to its last tokens.

The figures and their JSON keys are vLLM's. Each policy has its own engine; the engines alternate,
one iteration each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np

from kvserve.benchmarks.datasets.workload import DEFAULT_BLOCK_SIZE, blocks_at_once, random_prompts
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.measure import play, share
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    add_compare_speculation_argument,
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    check_speculation,
    chosen_policies,
)
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.progress import progress

_PERCENTILES = (10, 25, 50, 75, 90, 99)
_SIZES = (
    ("input_len", 32, "tokens per prompt"),
    ("output_len", 128, "tokens per output"),
    ("batch_size", 8, "prompts at once"),
    ("num_iters", 30, "iterations that count"),
    ("num_iters_warmup", 10, "iterations before them"),
)
_COLUMNS = columns(
    *("policy", "speculation", "avg_latency_ms", "p50_latency_ms", "p90_latency_ms"),
    "p99_latency_ms",
    *("ratio_to_first", "compactions_per_request", "draft_tokens", "accepted_share"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shapes=True)
    add_report_arguments(parser)
    add_pool_argument(parser)
    add_compare_speculation_argument(parser)
    for name, default, what in _SIZES:
        flag, words = f"--{name.replace('_', '-')}", f"{what} (default: {default})"
        parser.add_argument(flag, type=at_least(1), default=default, metavar="N", help=words)
    # Every iteration has the same prompts: with prefix caching only the first would compute them.
    parser.set_defaults(enable_prefix_caching=False)


def run(args: argparse.Namespace) -> int:
    check_speculation(args)
    return run_benchmark(Latency, args, chosen_policies(args))


@dataclass
class _Side:
    """One policy's engine, and the seconds, events and guesses of its iterations."""

    spec: PolicySpec
    engine: LLMEngine
    facts: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    compactions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def row(self, first: _Side, batch: int) -> Row:
        seconds, pairs = self.seconds, zip(self.seconds, first.seconds, strict=False)
        percentiles = np.percentile(seconds, _PERCENTILES).tolist()
        by_name = dict(zip(map(str, _PERCENTILES), percentiles, strict=True))
        return {
            "policy": self.spec.label,
            "policy_args": self.spec.as_dict,
            **self.facts,
            "avg_latency": mean(seconds),
            "latencies": seconds,
            "percentiles": by_name,
            "avg_latency_ms": 1000 * mean(seconds),
            **{f"p{p}_latency_ms": 1000 * by_name[str(p)] for p in (50, 90, 99)},
            "ratio_to_first": median(own / other for own, other in pairs),
            "compactions_per_request": None
            if self.spec == NO_COMPRESSION
            else self.compactions / (batch * len(seconds)),
            "draft_tokens": self.draft_tokens or None,
            "accepted_share": share(self.accepted_tokens, self.draft_tokens),
        }


class Latency(Benchmark):
    """Runs the same batch repeatedly, on every policy's engine in turn."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        lengths = [(args.input_len, args.output_len)] * args.batch_size
        self._workload = random_prompts(lengths, checkpoint.spec.vocab_size, args.seed)
        # Blocks for the whole batch and its query logs. A pool sized from free memory does not work
        # here: every policy has its own engine, and all are built before the first runs.
        ample = 2 * blocks_at_once(self._workload, args.block_size or DEFAULT_BLOCK_SIZE)
        settings: dict[str, Any] = {
            "max_num_seqs": args.batch_size,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": args.num_gpu_blocks_override or ample,
        }
        ways: list[tuple[dict[str, str], dict[str, Any]]] = [({}, {})]
        if args.compare_speculation:
            ways = [
                ({"speculation": "off"}, {"speculative_config": {}}),
                ({"speculation": "on"}, {}),
            ]
        self._sides = [
            _Side(spec, self.engines.build(spec, **settings, **how), facts)
            for spec in policies
            for facts, how in ways
        ]

    def measure(self) -> None:
        args = self.args
        turns = args.num_iters_warmup + args.num_iters
        for turn in progress(range(turns), unit="iteration", hidden=args.disable_tqdm):
            for side in self._sides:
                figures = play(side.engine, self._workload).figures
                if turn >= args.num_iters_warmup:
                    side.seconds.append(figures["wall_s"])
                    side.compactions += figures["compactions"]
                    side.draft_tokens += figures["draft_tokens"] or 0
                    side.accepted_tokens += figures["accepted_tokens"]

    def report(self) -> Report:
        args = self.args
        measured = [side for side in self._sides if side.seconds]
        rows = [side.row(measured[0], args.batch_size) for side in measured]
        about = [
            f"{args.batch_size} random prompts of {args.input_len} tokens, {args.output_len} "
            f"tokens each, on {self.checkpoint.name}; {args.num_iters} iterations in turns"
        ]
        settings = self.settings(*(name for name, _, _ in _SIZES), "num_gpu_blocks_override")
        return Report("latency", about, _COLUMNS, rows, settings)
