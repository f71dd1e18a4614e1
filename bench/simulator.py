"""Eviction schedules and query sources compared in simulation: `docs/simulator.md`.

    python bench/simulator.py --save-result bench/results/DATE-simulator-schedules.json

Models of 8 and 4 billion parameters on a device like an H200, a pool of 335k tokens, all requests
at once; outputs log-normal with mean 3,000, cut at 8,192. The engine does not have all variants.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Any, ClassVar

import numpy as np
from tqdm import tqdm

from kvserve.benchmarks.reports.report import Column, Report, Row, measure_and_publish
from kvserve.benchmarks.setup.lengths import lognormal_lengths
from kvserve.benchmarks.setup.options import add_report_arguments, at_least
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel, Queries
from kvserve.benchmarks.simulator.simulator import Simulation
from kvserve.engine.models.spec import parse_spec
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic
from kvserve.scheduler.triggers.trigger import Never, RowState, Trigger, WhenOver

POOL_TOKENS, PROMPT, MEAN, SIGMA, CAP = 335_000, 250, 3000, 0.7, 8192
HEADS, KV_HEADS = 32, 8  # of both models
DEVICE = DEVICES["h200"]


@dataclass(frozen=True)
class LoggedEngineWide(EngineWide):
    """The paper's schedule, with queries logged while decoding."""

    logs: ClassVar[bool] = True

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        return rows.first_uncompressed_pos


@dataclass(frozen=True)
class Variant:
    """A row. ``log_tokens``: how many tokens' queries fit in the space of one token's keys and
    values."""

    name: str
    trigger: Trigger
    queries: Queries
    block_size: int = 16
    log_tokens: float = 1.0
    event_overhead: float = DEVICE.event_overhead


ALL, EIGHTH = Queries("log", HEADS), Queries("log", HEADS, 1 / 8)
AGAIN, AGAIN_8 = Queries("recompute", HEADS), Queries("recompute", HEADS, 1 / 8)
MEANS = Queries("log", KV_HEADS)
THRESHOLD = WhenOver(1280, 1025, 32, protect_prompt=False)
PAPER = EngineWide(768, 32, 225, 128, 30)
LOGGED_PAPER = LoggedEngineWide(768, 32, 225, 128, 30)


def ours(window: int, keep: int, logs: bool) -> Periodic:
    """Kara's schedule here: all pending windows, every 32 steps of the sequence."""
    return Periodic(window, 32, keep, 32, logs=logs)


VARIANTS = (
    Variant("none", Never(), Queries("none")),
    Variant("threshold 1280 to 1025", THRESHOLD, ALL, log_tokens=0.5),
    Variant("the same, 25 ms per step with an event", THRESHOLD, ALL, 16, 0.5, 0.025),
    Variant("Kara as in the paper (30 per 128 steps, recompute)", PAPER, AGAIN, 256),
    Variant("the same, all heads logged", LOGGED_PAPER, ALL, 256, 0.5),
    Variant("the same, all heads logged, stride 8", LOGGED_PAPER, EIGHTH, 256, 4.0),
    Variant("the same, recompute, stride 8", PAPER, AGAIN_8, 256),
    Variant("the same, all heads in host memory", PAPER, Queries("host", HEADS), 256),
    Variant("all pending windows, period 32, recompute", ours(768, 225, False), AGAIN),
    *(
        Variant(f"{head}, {what}", ours(window, keep, logs), queries, 16, log_tokens)
        for what, logs, queries, log_tokens in (
            ("recompute, stride 8", False, AGAIN_8, 1.0),
            ("group-mean log in bf16", True, MEANS, 2.0),
            ("group-mean log in fp8", True, MEANS, 4.0),
        )
        for head, window, keep in (
            ("W 768 N 225", 768, 225),
            ("W 384 N 106", 384, 106),
            ("W 384 N 71", 384, 71),
        )
    ),
)


@dataclass(frozen=True)
class Job:
    variant: Variant
    shape: str
    max_num_seqs: int
    seed: int
    requests: int


def play(job: Job) -> dict[str, Any]:
    """One run's figures."""
    variant, size = job.variant, job.variant.block_size
    spec = parse_spec(LARGE_SHAPES[job.shape], job.shape)
    rng = np.random.default_rng(job.seed)
    outputs = lognormal_lengths(rng, job.requests, MEAN, SIGMA, CAP)
    layout = KVLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, size)
    settings = SchedulerSettings(
        num_blocks=POOL_TOKENS // size + 1,
        max_num_seqs=job.max_num_seqs,
        max_num_batched_tokens=2048,
        max_model_len=PROMPT + CAP,
        log_block_tokens=int(size * variant.log_tokens),
        prefix_caching=False,
        max_observed_tokens=10**9,  # the paper's events come in bursts
    )
    scheduler = Scheduler(layout, settings)
    cost = CostModel(spec, replace(DEVICE, event_overhead=variant.event_overhead))
    prompts = np.full(job.requests, PROMPT, np.int32)
    return Simulation(scheduler, variant.trigger, cost, variant.queries, prompts, outputs).run()


class Table:
    """Every variant at every concurrency, for every model; means over the seeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._jobs = [
            Job(variant, shape, most, seed, args.num_requests)
            for variant in VARIANTS
            for shape, most, seed in product(args.shape, args.max_num_seqs, range(args.seeds))
        ]
        self._done: dict[Job, dict[str, Any]] = {}

    def measure(self) -> None:
        with ProcessPoolExecutor(self._args.jobs) as pool:
            runs = zip(self._jobs, pool.map(play, self._jobs), strict=True)
            silent = True if self._args.disable_tqdm else None
            for job, figures in tqdm(runs, total=len(self._jobs), disable=silent, unit="run"):
                self._done[job] = figures

    def report(self) -> Report:
        args = self._args
        about = [
            f"{args.num_requests} requests, prompts of {PROMPT} tokens, outputs log-normal (mean "
            f"{MEAN}, sigma {SIGMA}) cut at {CAP}, {args.seeds} seeds, pool {POOL_TOKENS} tokens",
            "output tokens a second against none, simulated: nothing here was measured",
        ]
        columns = [Column("policy", "policy", left=True)]
        for shape, most in product(args.shape, args.max_num_seqs):
            columns.append(Column(f"{shape} {most}", f"{shape}/{most}/ratio", ".2f"))
        last = f"{args.shape[0]}/{args.max_num_seqs[-1]}"  # further columns are for this one
        columns += [
            Column("mean running", f"{last}/mean_running", ".0f"),
            Column("held/logical", f"{last}/held_over_logical", ".2f"),
            Column("preemptions", f"{last}/preemptions", ".0f"),
            Column("itl p99 ms", f"{last}/itl_p99_ms", ".0f"),
            Column("itl max ms", f"{last}/itl_max_ms", ".0f"),
        ]
        settings = {"seeds": args.seeds, "requests": args.num_requests, "pool_tokens": POOL_TOKENS}
        settings |= {"prompt": PROMPT, "mean": MEAN, "sigma": SIGMA, "cap": CAP}
        rows = [row for variant in VARIANTS if (row := self._row(variant))]
        device = {"type": "simulated", "name": "h200"}
        program = "python bench/simulator.py"
        return Report("simulator", about, columns, rows, settings, device=device, program=program)

    def _row(self, variant: Variant) -> Row:
        row: dict[str, Any] = {}
        for shape, most in product(self._args.shape, self._args.max_num_seqs):
            same = (job for job in self._jobs if (job.shape, job.max_num_seqs) == (shape, most))
            runs = [job for job in same if job.variant == variant]
            if not all(job in self._done for job in runs):
                return {}
            bases = [self._done[replace(job, variant=VARIANTS[0])] for job in runs]
            figures = [self._done[job] for job in runs]
            cell = {name: mean(run[name] for run in figures) for name in figures[0]}
            for name, label in (
                ("output_tok_s", "ratio"),
                ("mean_step_output_tok_s", "step_ratio"),
            ):
                pairs = zip(figures, bases, strict=True)
                cell[label] = mean(run[name] / base[name] for run, base in pairs)
            row |= {f"{shape}/{most}/{name}": value for name, value in cell.items()}
        return {"policy": variant.name, **row}


def main() -> int:
    parser = argparse.ArgumentParser(description="schedules and sources of queries, simulated")
    add_report_arguments(parser)
    shapes = list(LARGE_SHAPES)
    parser.add_argument("--shape", nargs="+", choices=shapes, default=shapes, help="default: both")
    words = "most running at once (default: 128 256)"
    parser.add_argument(
        "--max-num-seqs", nargs="+", type=at_least(1), default=[128, 256], metavar="N", help=words
    )
    parser.add_argument(
        "--num-requests", type=at_least(1), default=500, metavar="N", help="default: 500"
    )
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="default: 3")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N", help="processes")
    args = parser.parse_args()
    return measure_and_publish(Table(args), args)


if __name__ == "__main__":
    raise SystemExit(main())
