"""``kvserve bench throughput``: policies compared on one pool or on several, in one process.

The main figure is total output tokens over wall time; the scheduler's counters stand beside it.
Every run has a fresh engine and a warm-up that does not count. With ``--repeat`` the rows
alternate, so that both sides of a ratio were measured at about the same time. The first policy is
what the others of its pool are compared with: put ``none`` first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from kvserve.benchmarks.datasets.datasets import check_dataset
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.measure import Figures
from kvserve.benchmarks.measuring.runs import Contestant, rows_against_first, run_in_turns
from kvserve.benchmarks.measuring.traffic import PoolSize, Traffic, add_traffic_arguments
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.plots import plot_rows
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    check_matplotlib,
    chosen_policies,
    number,
)
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.config import KV_CACHE_DTYPES, SchedulerConfig

_COLUMNS = columns(
    *("pool_blocks", "pool_share", "max_num_seqs"),
    *("policy", "kv_cache_dtype", "prefix_caching", "speculation"),
    *("output_tokens", "wall_s"),
    *("output_tok_s", "spread", "ratio_to_first", "mean_running", "peak_running"),
    *("mean_pool_usage", "held_over_logical", "mean_held_bytes", "allocated_bytes_at_end"),
    *("blocks_released", "compactions", "event_ms", "early_compactions", "evicted_tokens"),
    "preemptions",
    *("swaps", "prompt_cached", "draft_tokens", "accepted_share", "steps", "itl_p50_ms"),
    "itl_p99_ms",
    *("exact_match", "interval_95", "correct_prefix"),
)
_WAYS = ("kv_cache_dtype", "prefix_caching", "speculation")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shapes=True)
    add_report_arguments(parser)
    add_traffic_arguments(parser)
    words = "run every policy without and with --speculative-config, alternating"
    parser.add_argument("--compare-speculation", action="store_true", help=words)
    pool = parser.add_mutually_exclusive_group()
    add_pool_argument(pool)
    pool.add_argument(
        "--pool-shares",
        "--pool-share",
        nargs="+",
        type=number(0),
        metavar="X",
        help="pool sizes as shares of the demand: blocks of all requests together, at full length "
        "and uncompressed; every row runs on each of them",
    )
    seqs = SchedulerConfig().max_num_seqs
    parser.add_argument(
        "--max-num-seqs",
        dest="sequence_limits",
        nargs="+",
        type=at_least(1),
        default=[seqs],
        metavar="N",
        help=f"most sequences running at once; every row runs with each (default: {seqs})",
    )
    words = "run every policy with prefix caching on and off, alternating"
    parser.add_argument("--compare-prefix-caching", action="store_true", help=words)
    parser.add_argument(
        "--compare-kv-cache-dtypes",
        nargs="+",
        metavar="DTYPE",
        choices=KV_CACHE_DTYPES,
        help="run every policy with its cache held in each of these, alternating, pools of equal "
        f"bytes: some of {', '.join(KV_CACHE_DTYPES)} (needs --pool-shares); for one policy alone "
        "write NAME@DTYPE",
    )
    words = "draw throughput, by pool or against accuracy where that is graded, here"
    parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)


def run(args: argparse.Namespace) -> int:
    if args.save_plots:
        check_matplotlib(args, "--save-plots")
    policies = chosen_policies(args)
    check_dataset(args)
    if args.compare_speculation and not args.speculative_config:
        args.fail("--compare-speculation needs --speculative-config: how tokens are guessed")
    if args.compare_prefix_caching and args.enable_prefix_caching is not None:
        args.fail("--compare-prefix-caching runs both sides of --enable-prefix-caching: give one")
    if args.compare_kv_cache_dtypes and args.kv_cache_dtype:
        args.fail("--compare-kv-cache-dtypes and --kv-cache-dtype exclude each other")
    if _several_types(args, policies) and not args.pool_shares:
        args.fail("caches in other types: pools of as many bytes need --pool-shares X")
    return run_benchmark(Throughput, args, policies)


def _several_types(args: argparse.Namespace, policies: Sequence[PolicySpec]) -> bool:
    """Whether rows say what their cache is held in."""
    return bool(args.compare_kv_cache_dtypes) or any(spec.kv_cache_dtype for spec in policies)


class Throughput(Benchmark):
    """A grid of cells (sequence limit, pool size), each with every policy; runs take turns."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._traffic = Traffic(args, checkpoint, self.engines)
        blocks, shares = args.num_gpu_blocks_override, args.pool_shares
        self._pools = [self._traffic.pool(blocks)]
        if shares and not blocks:
            pools = (self._traffic.pool(share=share) for share in sorted(shares))
            self._pools = list({pool.blocks: pool for pool in pools}.values())
        limits = sorted(set(args.sequence_limits))
        varies = len(limits) * len(self._pools) > 1
        self._cells = [
            [each for spec in policies for each in self._sides(spec, pool, limit, varies)]
            for limit, pool in product(limits, self._pools)
        ]

    def measure(self) -> None:
        everybody = [contestant for cell in self._cells for contestant in cell]
        run_in_turns(everybody, self.args.repeat)

    def report(self) -> Report:
        args = self.args
        rows = [row for cell in self._cells for row in rows_against_first(cell)]
        for row in rows:
            if row.get("compactions"):
                row["event_ms"] = 1000 * row.get("compaction_s", 0.0) / row["compactions"]
        settings = self.settings("pool_shares") | {"max_num_seqs": args.sequence_limits}
        settings |= {**self._traffic.settings(), **self._pools[0].settings()}
        about = [
            f"{self._traffic.describe()} on {self.checkpoint.name}, "
            f"at most {' or '.join(map(str, args.sequence_limits))} running",
            *(pool.describe() for pool in self._pools),
        ]
        plots = plot_rows(rows, args.save_plots) if args.save_plots and rows else []
        return Report("throughput", about, _COLUMNS, rows, settings, notes(rows), plots=plots)

    def _sides(
        self, spec: PolicySpec, pool: PoolSize, limit: int, varies: bool
    ) -> list[Contestant]:
        """One contestant, or one for each way of running the policy that a ``--compare-...`` flag
        asks for."""
        ways: list[dict[str, str]] = [{}]
        if self.args.compare_prefix_caching:
            ways = [{"prefix_caching": side} for side in ("off", "on")]
        if _several_types(self.args, self.policies):
            held = self.as_held([spec])
            ways = [way | {"kv_cache_dtype": dtype} for way in ways for _, dtype in held]
            spec = held[0][0]
        if self.args.compare_speculation:
            ways = [way | {"speculation": side} for way in ways for side in ("off", "on")]
        cell: dict[str, Any] = {
            **{"pool_blocks": pool.blocks, "pool_share": pool.share, "max_num_seqs": limit}
        }
        return [
            Contestant(
                spec.label,
                spec,
                self._run(spec, way, pool=pool, max_num_seqs=limit),
                {**way, **(cell if varies else {})},
            )
            for way in ways
        ]

    def _run(self, spec: PolicySpec, way: dict[str, str], **cell: Any) -> Callable[[str], Figures]:
        settings: dict[str, Any] = {**way, **cell}
        if "prefix_caching" in way:
            settings["enable_prefix_caching"] = settings.pop("prefix_caching") == "on"
        if settings.pop("speculation", None) == "off":
            settings["speculative_config"] = {}
        return partial(self._traffic.run, spec, **settings)


def notes(rows: Sequence[Row]) -> list[str]:
    """Notes that a reader must not overlook: one for each way of running a policy."""
    found: list[str] = []
    lines: dict[str, list[Row]] = {}
    for row in rows:
        told = [
            row["policy"],
            *(f"{name.replace('_', ' ')} {row[name]}" for name in _WAYS if name in row),
        ]
        lines.setdefault(", ".join(told), []).append(row)
    for label, line in lines.items():
        compresses = line[0]["policy_args"]["name"] != NO_COMPRESSION.name
        ratios = [row["ratio_to_first"] for row in line]
        if compresses and not any(row["compactions"] for row in line):
            found.append(f"{label}: no event; its budget was never reached")
        elif len(line) > 1 and ratios != [1.0] * len(line):
            said = ", ".join(f"{_where(row)} {row['ratio_to_first']:.2f}" for row in line)
            found.append(f"{label}: times the first row of its cell: {said}")
        elif len(line) == 1 and ratios[0] < 1:
            found.append(f"{label}: {ratios[0]:.2f} of the first row; it did not pay here")
        for row in line:
            if row["cut_short"]:
                found.append(
                    f"{label}: {row['cut_short']} requests ended early: each did not fit the pool "
                    "even alone"
                )
    return found


def _where(row: Row) -> str:
    share = row["pool_share"]
    return f"at {row['max_num_seqs']}:" if share is None else f"on a pool of {share:.2f}:"
