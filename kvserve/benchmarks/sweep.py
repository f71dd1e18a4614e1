"""``kvserve bench sweep``: every policy on every pool beside the full cache, and where it pays.

All rows take turns, so that each ratio to ``none`` is between runs of the same minutes. The figure
that counts is the crossover: the pool size below which a policy is faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvserve.benchmarks.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.checkpoint import Checkpoint
from kvserve.benchmarks.columns import columns
from kvserve.benchmarks.crossover import PoolPoint, crossovers, verdict
from kvserve.benchmarks.datasets import check_dataset
from kvserve.benchmarks.options import (
    add_engine_arguments,
    add_report_arguments,
    add_retention_argument,
    at_least,
    check_matplotlib,
    number,
    policies_by_retention,
)
from kvserve.benchmarks.plots import plot_sweep
from kvserve.benchmarks.policy_spec import PolicySpec
from kvserve.benchmarks.report import Report, Row
from kvserve.benchmarks.runs import Contestant, rows_against_first, run_in_turns
from kvserve.benchmarks.traffic import Pool, Traffic, add_traffic_arguments
from kvserve.config import SchedulerConfig

_SHARES = [0.125, 0.25, 0.5, 0.75, 1.0, 1.25]
_COLUMNS = columns(
    *("pool_blocks", "pool_share", "max_num_seqs", "policy", "output_tok_s", "ratio_to_none"),
    *("ratio_spread", "mean_running", "peak_running", "held_over_logical", "blocks_released"),
    *("compactions", "early_compactions", "preemptions", "swaps", "itl_p99_ms"),
    *("exact_match", "interval_95", "correct_prefix"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shapes=True)
    add_retention_argument(parser)
    add_report_arguments(parser)
    add_traffic_arguments(parser)
    parser.add_argument(
        "--pool-shares",
        nargs="+",
        type=number(0),
        metavar="X",
        help="KV blocks as shares of what all requests want at once at full length, uncompressed "
        f"(default: {' '.join(map(str, _SHARES))})",
    )
    words = "KV blocks, absolute; beside --pool-shares if that is given too"
    parser.add_argument("--pool-blocks", nargs="+", type=at_least(2), metavar="N", help=words)
    seqs = SchedulerConfig().max_num_seqs
    parser.add_argument(
        "--max-num-seqs",
        dest="sequence_limits",
        nargs="+",
        type=at_least(1),
        default=[seqs],
        metavar="N",
        help=f"most running at once (default: {seqs})",
    )
    words = "draw throughput, running sequences and accuracy into this folder"
    parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)


def run(args: argparse.Namespace) -> int:
    policies = policies_by_retention(args)
    check_dataset(args)
    if args.save_plots:
        check_matplotlib(args, "--save-plots")
    return run_benchmark(Sweep, args, policies)


class Sweep(Benchmark):
    """A grid of cells (most running, pool), in each of them every policy, the full cache first."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._traffic = Traffic(args, checkpoint, self.engines)
        self._cells = [
            [self._contestant(spec, pool, seqs) for spec in policies]
            for seqs in sorted(set(args.sequence_limits))
            for pool in self._pools()
        ]

    def measure(self) -> None:
        everybody = [contestant for cell in self._cells for contestant in cell]
        run_in_turns(everybody, self.args.repeat, show=not self.args.disable_tqdm)

    def report(self) -> Report:
        args = self.args
        rows = [row for cell in self._cells for row in rows_against_first(cell, "none")]
        crossings = [] if not rows else self._crossings(rows)
        notes = [crossing["sentence"] for crossing in crossings]
        plots = plot_sweep(rows, crossings, args.save_plots) if args.save_plots and rows else []
        settings = {
            **self.settings("pool_shares", "pool_blocks", "retention"),
            "max_num_seqs": args.sequence_limits,
            **self._traffic.settings(),
            "block_size": self._traffic.block_size,
        }
        about = [
            f"{args.num_prompts} x {args.dataset} (seed {args.seed}) on {self.checkpoint.name}; "
            f"demand of {self._traffic.demand:,} blocks of {self._traffic.block_size} tokens"
        ]
        findings = {"crossovers": crossings}
        return Report("sweep", about, _COLUMNS, rows, settings, notes, findings, plots)

    def _pools(self) -> list[Pool]:
        shares = self.args.pool_shares or ([] if self.args.pool_blocks else _SHARES)
        pools = [self._traffic.pool(share=share) for share in shares]
        pools += [self._traffic.pool(blocks) for blocks in self.args.pool_blocks or ()]
        return sorted({pool.blocks: pool for pool in pools}.values(), key=lambda p: p.blocks or 0)

    def _contestant(self, spec: PolicySpec, pool: Pool, seqs: int) -> Contestant:
        run = partial(self._traffic.run, spec, pool=pool, max_num_seqs=seqs, show=False)
        facts = {"pool_blocks": pool.blocks, "pool_share": pool.share, "max_num_seqs": seqs}
        return Contestant(spec.label, spec, run, facts)

    def _crossings(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Of each policy, and of each limit on what runs: where it passes the full cache."""
        demand, limits = self._traffic.demand, sorted(set(self.args.sequence_limits))
        found = []
        for spec in self.policies[1:]:
            for seqs in limits:
                points = [
                    PoolPoint(row["pool_blocks"], row["ratio_to_none_all"])
                    for row in rows
                    if row["policy"] == spec.label and row["max_num_seqs"] == seqs
                ]
                if not points:
                    continue
                label = spec.label + (f", at most {seqs} running" if len(limits) > 1 else "")
                at = crossovers(points)
                found.append(
                    {
                        "policy": spec.label,
                        "max_num_seqs": seqs,
                        "blocks": at,
                        "shares": [blocks / demand for blocks in at],
                        "sentence": verdict(label, points, demand),
                    }
                )
        return found
