"""``kvserve bench throughput``: policies compared on one pool, in one process.

The main figure is total output tokens over wall time; the scheduler's counters stand beside it.
Every run has a fresh engine and a warm-up that does not count. With ``--repeat`` the rows
alternate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvserve.benchmarks.datasets.datasets import check_dataset
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.measure import Figures
from kvserve.benchmarks.measuring.runs import Contestant, rows_against_first, run_in_turns
from kvserve.benchmarks.measuring.traffic import Traffic, add_traffic_arguments
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.plots import plot_rows
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    KV_CACHE_DTYPES,
    add_compare_speculation_argument,
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    check_matplotlib,
    check_speculation,
    chosen_policies,
    number,
)
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.config import SchedulerConfig
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.progress import progress

_COLUMNS = columns(
    *("policy", "kv_cache_dtype", "prefix_caching", "code_attention", "speculation"),
    *("output_tokens", "wall_s"),
    *("output_tok_s", "spread", "ratio_to_first", "mean_running", "peak_running"),
    *("mean_pool_usage", "held_over_logical", "mean_held_bytes", "allocated_bytes_at_end"),
    *("blocks_released", "compactions", "early_compactions", "evicted_tokens", "preemptions"),
    *("swaps", "prompt_cached", "draft_tokens", "accepted_share", "steps", "itl_p50_ms"),
    "itl_p99_ms",
    *("exact_match", "interval_95", "correct_prefix"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shapes=True)
    add_report_arguments(parser)
    add_traffic_arguments(parser)
    add_compare_speculation_argument(parser)
    pool = parser.add_mutually_exclusive_group()
    add_pool_argument(pool)
    pool.add_argument(
        "--pool-share",
        type=number(0),
        metavar="X",
        help="pool size as a share of the demand: blocks of all requests together, at full length "
        "and uncompressed",
    )
    seqs = SchedulerConfig().max_num_seqs
    words = f"most sequences running at once (default: {seqs})"
    parser.add_argument("--max-num-seqs", type=at_least(1), default=seqs, metavar="N", help=words)
    parser.add_argument(
        "--compare-prefix-caching",
        action="store_true",
        help="run every policy with prefix caching on and off, alternating",
    )
    parser.add_argument(
        "--compare-code-attention",
        action="store_true",
        help="run policies with coded entries twice, alternating: attention on the codes, and on "
        "rebuilt entries",
    )
    parser.add_argument(
        "--compare-kv-cache-dtypes",
        nargs="+",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
        help="run every policy with its cache held in each of these, alternating, pools of equal "
        f"bytes: some of {', '.join(KV_CACHE_DTYPES)} (needs --pool-share)",
    )
    parser.add_argument(
        "--compare-transformers",
        action="store_true",
        help="add transformers' generate, in static batches of --max-num-seqs prompts",
    )

    words = "draw throughput, against accuracy where answers are graded, into this folder"
    parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)


def run(args: argparse.Namespace) -> int:
    if args.save_plots:
        check_matplotlib(args, "--save-plots")
    policies = chosen_policies(args)
    check_dataset(args)
    check_speculation(args)
    if args.compare_prefix_caching and args.enable_prefix_caching is not None:
        args.fail("--compare-prefix-caching runs both sides of --enable-prefix-caching: give one")
    if args.compare_kv_cache_dtypes and args.kv_cache_dtype:
        args.fail("--compare-kv-cache-dtypes and --kv-cache-dtype exclude each other")
    if args.compare_kv_cache_dtypes and args.pool_share is None:
        args.fail("--compare-kv-cache-dtypes: pools of as many bytes need --pool-share X")
    return run_benchmark(Throughput, args, policies, write_weights=args.compare_transformers)


class Throughput(Benchmark):
    """The runs of one command, in turns over the contestants."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._traffic = Traffic(args, checkpoint, self.engines)
        self._pool = self._traffic.pool(args.num_gpu_blocks_override, args.pool_share)
        self._contestants = [each for spec in policies for each in self._sides(spec)]
        if args.compare_transformers:
            label = f"transformers, batch {min(args.max_num_seqs, args.num_prompts)}"
            self._contestants.append(Contestant(label, None, self._run_transformers))

    def measure(self) -> None:
        run_in_turns(self._contestants, self.args.repeat)

    def report(self) -> Report:
        args = self.args
        rows = rows_against_first(self._contestants)
        settings = self.settings("max_num_seqs", "pool_share")
        settings |= {**self._traffic.settings(), **self._pool.settings()}
        about = [
            f"{self._traffic.describe()} on {self.checkpoint.name}, "
            f"at most {args.max_num_seqs} running",
            self._pool.describe(),
        ]
        plots = plot_rows(rows, args.save_plots) if args.save_plots and rows else []
        return Report("throughput", about, _COLUMNS, rows, settings, notes(rows), plots=plots)

    def _sides(self, spec: PolicySpec) -> list[Contestant]:
        """One contestant, or one for each way of running the policy that a ``--compare-...`` flag
        asks for."""
        ways: list[dict[str, str]] = [{}]
        if self.args.compare_prefix_caching:
            ways = [{"prefix_caching": side} for side in ("off", "on")]
        if dtypes := self.args.compare_kv_cache_dtypes:
            ways = [way | {"kv_cache_dtype": dtype} for way in ways for dtype in dtypes]
        if self.args.compare_code_attention and writes_codes(make_policy(spec.as_dict)):
            ways = [way | {"code_attention": how} for way in ways for how in ("direct", "rebuild")]
        if self.args.compare_speculation:
            ways = [way | {"speculation": side} for way in ways for side in ("off", "on")]
        return [Contestant(spec.label, spec, self._run(spec, way), way) for way in ways]

    def _run(self, spec: PolicySpec, way: dict[str, str]) -> Callable[[str], Figures]:
        settings: dict[str, Any] = {**way}
        if "prefix_caching" in way:
            settings["enable_prefix_caching"] = settings.pop("prefix_caching") == "on"
        if settings.pop("speculation", None) == "off":
            settings["speculative_config"] = {}
        return partial(self._traffic.run, spec, pool=self._pool, **settings)

    def _run_transformers(self, title: str) -> Figures:
        from kvserve.benchmarks.measuring.transformers_baseline import generate

        args, traffic = self.args, self._traffic
        named = {"desc": title, "unit": "request", "hidden": args.disable_tqdm}
        with progress(total=len(traffic.workload), **named) as bar:
            return generate(
                self.checkpoint.path,
                args.dtype or "auto",
                traffic.tokenizer,
                traffic.warmup,
                traffic.workload,
                min(args.max_num_seqs, args.num_prompts),
                bar,
            )


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes that a reader must not overlook."""
    found = []
    for row in rows:
        label, ratio = row["policy"], row["ratio_to_first"]
        if "kv_cache_dtype" in row:
            label += f", cache in {row['kv_cache_dtype']}"
        if "prefix_caching" in row:
            label += f", prefix caching {row['prefix_caching']}"
        if "code_attention" in row:
            label += f", codes {row['code_attention']}"
        if "speculation" in row:
            label += f", speculation {row['speculation']}"
        if row["policy_args"] is None:
            continue
        if row["policy_args"]["name"] != NO_COMPRESSION.name and not row["compactions"]:
            found.append(f"{label}: no event; its budget was never reached")
        elif row is not rows[0] and ratio < 1:
            found.append(f"{label}: {ratio:.2f} of the first row; it did not pay here")
        if row["cut_short"]:
            found.append(
                f"{label}: {row['cut_short']} requests ended early: each did not fit the pool even "
                "alone"
            )
    return found
