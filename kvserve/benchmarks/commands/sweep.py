"""``kvserve bench sweep``: every policy on every pool size, beside the full cache.

The rows alternate, so that both sides of a ratio to ``none`` were measured at about the same time.
The main result is the crossover: the pool size below which a policy is faster than ``none``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvserve.benchmarks.datasets.datasets import check_dataset
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.runs import Contestant, rows_against_first, run_in_turns
from kvserve.benchmarks.measuring.traffic import PoolSize, Traffic, add_traffic_arguments
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.crossover import Point, crossovers, length_verdict, verdict
from kvserve.benchmarks.reports.plots import plot_sweep
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    add_engine_arguments,
    add_report_arguments,
    add_retention_argument,
    at_least,
    check_matplotlib,
    number,
    policies_by_retention,
)
from kvserve.benchmarks.setup.policy_spec import PolicySpec
from kvserve.config import SchedulerConfig

_SHARES = [0.125, 0.25, 0.5, 0.75, 1.0, 1.25]
_COLUMNS = columns(
    *("output_len", "pool_blocks", "pool_share", "max_num_seqs", "policy", "output_tok_s"),
    *("ratio_to_none", "ratio_spread", "mean_running", "peak_running", "held_over_logical"),
    *("mean_held_bytes", "blocks_released", "compactions", "early_compactions", "preemptions"),
    *("swaps", "itl_p99_ms", "exact_match", "interval_95", "correct_prefix"),
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
        help="pool sizes as shares of the demand: blocks of all requests together, at full length "
        "and uncompressed "
        f"(default: {' '.join(map(str, _SHARES))})",
    )
    words = "pool sizes in blocks; in addition to --pool-shares where both are given"
    parser.add_argument("--pool-blocks", nargs="+", type=at_least(2), metavar="N", help=words)
    words = "random: several mean lengths of answers, in place of --output-len"
    parser.add_argument("--output-lens", nargs="+", type=at_least(1), metavar="N", help=words)
    seqs = SchedulerConfig().max_num_seqs
    parser.add_argument(
        "--max-num-seqs",
        dest="sequence_limits",
        nargs="+",
        type=at_least(1),
        default=[seqs],
        metavar="N",
        help=f"most sequences running at once (default: {seqs})",
    )
    words = "draw throughput, running sequences and accuracy into this folder"
    parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)


def run(args: argparse.Namespace) -> int:
    policies = policies_by_retention(args)
    check_dataset(args)
    if args.output_lens and (args.dataset != "random" or args.output_len or args.pool_blocks):
        args.fail("--output-lens is for --dataset random, without --output-len and --pool-blocks")
    if args.save_plots:
        check_matplotlib(args, "--save-plots")
    return run_benchmark(Sweep, args, policies)


class Sweep(Benchmark):
    """A grid of cells (output length, sequence limit, pool size). Each cell runs every policy, the
    full cache first."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        lengths = sorted(set(args.output_lens)) if args.output_lens else [args.output_len]
        self._traffics = [self._traffic(length) for length in lengths]
        self._cells = [
            [self._contestant(spec, length, traffic, pool, seqs) for spec in policies]
            for length, traffic in zip(lengths, self._traffics, strict=True)
            for seqs in sorted(set(args.sequence_limits))
            for pool in self._pools(traffic)
        ]

    def measure(self) -> None:
        everybody = [contestant for cell in self._cells for contestant in cell]
        show = not self.args.disable_tqdm
        run_in_turns(everybody, self.args.repeat, show)

    def report(self) -> Report:
        args = self.args
        rows = [row for cell in self._cells for row in rows_against_first(cell, "none")]
        crossings = [] if not rows else self._crossings(rows)
        notes = [crossing["sentence"] for crossing in crossings]
        plots = plot_sweep(rows, crossings, args.save_plots) if args.save_plots and rows else []
        settings = {
            **self.settings("pool_shares", "pool_blocks", "retention"),
            "max_num_seqs": args.sequence_limits,
            **self._traffics[0].settings(),
            "output_lens": args.output_lens,
            "block_size": self._traffics[0].block_size,
        }
        about = [
            f"{traffic.describe()} on {self.checkpoint.name}; "
            f"demand of {traffic.demand:,} blocks of {traffic.block_size} tokens"
            for traffic in self._traffics
        ]
        findings = {"crossovers": crossings}
        return Report("sweep", about, _COLUMNS, rows, settings, notes, findings, plots)

    def _traffic(self, length: int | None) -> Traffic:
        """The traffic that the flags ask for, with this output length."""
        given = argparse.Namespace(**{**vars(self.args), "output_len": length})
        return Traffic(given, self.checkpoint, self.engines)

    def _pools(self, traffic: Traffic) -> list[PoolSize]:
        shares = self.args.pool_shares or ([] if self.args.pool_blocks else _SHARES)
        pools = [traffic.pool(share=share) for share in shares]
        pools += [traffic.pool(blocks) for blocks in self.args.pool_blocks or ()]
        return sorted({pool.blocks: pool for pool in pools}.values(), key=lambda p: p.blocks or 0)

    def _contestant(
        self, spec: PolicySpec, length: int | None, traffic: Traffic, pool: PoolSize, seqs: int
    ) -> Contestant:
        run = partial(traffic.run, spec, pool=pool, max_num_seqs=seqs, show=False)
        facts = {"pool_blocks": pool.blocks, "pool_share": pool.share, "max_num_seqs": seqs}
        if self.args.output_lens:
            facts["output_len"] = length
        return Contestant(spec.label, spec, run, facts)

    def _crossings(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """For each policy, all else equal: the pool or the length where it becomes faster than
        none."""
        limits, lengths = sorted(set(self.args.sequence_limits)), self.args.output_lens
        lines: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row["policy"] != self.policies[0].label:
                share = round(row["pool_share"], 2) if lengths else None
                lines.setdefault((row["policy"], row["max_num_seqs"], share), []).append(row)
        found = []
        for (policy, seqs, share), line in lines.items():
            label = policy + (f", at most {seqs} running" if len(limits) > 1 else "")
            same = {"policy": policy, "max_num_seqs": seqs}
            axis = "output_len" if lengths else "pool_blocks"
            points = [Point(row[axis], row["ratio_to_none_all"]) for row in line]
            at = crossovers(points)
            if lengths:
                label += f", pool of {share:.2f}"
                sentence = length_verdict(label, points)
                found.append({**same, "pool_share": share, "tokens": at, "sentence": sentence})
            else:
                demand = self._traffics[0].demand
                shares = [blocks / demand for blocks in at]
                sentence = verdict(label, points, demand)
                found.append({**same, "blocks": at, "shares": shares, "sentence": sentence})
        return found
