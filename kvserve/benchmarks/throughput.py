"""``kvserve bench throughput``: policies against each other on one pool, in one process.

Total output tokens over wall time is the figure; what the scheduler did stands beside it. Every run
has a fresh engine and a warm-up that does not count; ``--repeat`` takes the policies in turns.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from statistics import median

from tqdm import tqdm

from kvserve.benchmarks.measure import Figures, accuracy, play
from kvserve.benchmarks.options import (
    SHAPES,
    Checkpoint,
    PolicySpec,
    add_engine_arguments,
    add_report_arguments,
    at_least,
    chosen_policies,
    fraction,
    opened_checkpoint,
)
from kvserve.benchmarks.report import Column, Report, Row, run_and_publish
from kvserve.benchmarks.tasks import TASKS
from kvserve.benchmarks.workload import Workload, blocks_at_once, random_prompts, task_prompts
from kvserve.config import SchedulerConfig
from kvserve.engine.llm import LLM
from kvserve.engine.tokenizer import Tokenizer

_RANDOM = "random"
_LENGTHS = {"input_len": 64, "output_len": 256}  # of random prompts, in tokens
_BLOCK_SIZE = 16
_COLUMNS = (
    Column("policy", "policy", left=True),
    Column("output tokens", "output_tokens", ",d"),
    Column("wall s", "wall_s", ".2f"),
    Column("output tok/s", "output_tok_s", ",.1f"),
    Column("of all runs", "spread"),
    Column("vs first", "ratio_to_first", ".2f"),
    Column("mean running", "mean_running", ".1f"),
    Column("peak", "peak_running", "d"),
    Column("pool in use", "mean_pool_usage", ".0%"),
    Column("held/logical", "held_over_logical", ".2f"),
    Column("blocks released", "blocks_released", ",d"),
    Column("events", "compactions", ",d"),
    Column("evicted", "evicted_tokens", ",d"),
    Column("preemptions", "preemptions", ",d"),
    Column("steps", "steps", ",d"),
    Column("itl p50 ms", "itl_p50_ms", ".1f"),
    Column("itl p99 ms", "itl_p99_ms", ".1f"),
    Column("exact match", "exact_match", ".2f"),
    Column("correct prefix", "correct_prefix", ".3f"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
    model = add_engine_arguments(parser)
    add_report_arguments(parser)
    model.add_argument("--shape", choices=SHAPES, help="a Llama of this size with random weights")
    parser.add_argument(
        "--dataset",
        choices=(_RANDOM, *TASKS),
        default=_RANDOM,
        help=f"random token ids, or a shipped task, graded (default: {_RANDOM})",
    )
    words = "conversations (default: 100)"
    parser.add_argument("--num-prompts", type=count, default=100, metavar="N", help=words)
    for name, default in _LENGTHS.items():
        flag = name.replace("_", "-")
        words = f"tokens per random {name.removesuffix('_len')} (default: {default})"
        parser.add_argument(f"--{flag}", f"--random-{flag}", type=count, metavar="N", help=words)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="random outputs have their full length (default: on)",
    )
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--num-gpu-blocks-override", "--kv-blocks", type=at_least(2), metavar="N", help="KV blocks"
    )
    pool.add_argument(
        "--pool-share",
        type=fraction,
        metavar="X",
        help="KV blocks as a share of what all requests want at once at full length, uncompressed",
    )
    seqs = SchedulerConfig().max_num_seqs
    words = f"most running at once (default: {seqs})"
    parser.add_argument("--max-num-seqs", type=count, default=seqs, metavar="N", help=words)
    words = "other prompts run first, not counted (default: 1)"
    parser.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N", help=words)
    words = "runs per policy, in turns; the median one is shown (default: 1)"
    parser.add_argument("--repeat", type=count, default=1, metavar="N", help=words)
    parser.add_argument(
        "--compare-transformers",
        action="store_true",
        help="add transformers' generate, in static batches of --max-num-seqs prompts",
    )


def run(args: argparse.Namespace) -> int:
    policies = chosen_policies(args)
    if args.dataset != _RANDOM:
        for name in (*_LENGTHS, "ignore_eos"):
            if getattr(args, name) is not None:
                args.fail(f"--{name.replace('_', '-')} is for --dataset {_RANDOM}")
        if args.shape:
            args.fail(f"--dataset {args.dataset} needs a tokenizer, which --shape has not")
    with opened_checkpoint(args, args.shape, args.compare_transformers) as checkpoint:
        bench = Throughput(args, checkpoint, policies)
        return run_and_publish(bench.measure, bench.report, args.save_result)


@dataclass(frozen=True)
class Pool:
    """KV blocks given to every engine (``None``: sized from memory), beside the demand for them."""

    blocks: int | None
    block_size: int
    demand: int

    def settings(self) -> dict[str, int]:
        """Keyword arguments of ``LLM``."""
        size = {"block_size": self.block_size}
        return size if self.blocks is None else {**size, "num_gpu_blocks_override": self.blocks}

    def describe(self) -> str:
        demand = (
            f"demand (all requests at once, at full length, uncompressed): {self.demand:,} blocks "
            f"of {self.block_size} tokens"
        )
        if self.blocks is None:
            return f"pool sized from memory; {demand}"
        return f"pool of {self.blocks:,} blocks, {self.blocks / self.demand:.2f} of the {demand}"


def pool_for(args: argparse.Namespace, workload: Workload) -> Pool:
    """The pool of ``--num-gpu-blocks-override`` or ``--pool-share``."""
    size = args.block_size or _BLOCK_SIZE
    demand = blocks_at_once(workload, size)
    blocks = args.num_gpu_blocks_override
    if args.pool_share:
        blocks = max(2, ceil(args.pool_share * demand))
    return Pool(blocks, size, demand)


@dataclass
class Contestant:
    """One row: how it is run, and the figures of each run."""

    label: str
    spec: PolicySpec | None
    run: Callable[[str], Figures]
    runs: list[Figures] = field(default_factory=list)

    def row(self, first: Contestant) -> Row:
        """The run of median throughput; its ratio is the median over turns, so that both sides of
        it saw the same load on the machine. What all runs reached stands in ``..._all``.
        """
        by_rate = sorted(self.runs, key=lambda run: run["output_tok_s"])
        rates = [run["output_tok_s"] for run in self.runs]
        pairs = zip(rates, (run["output_tok_s"] for run in first.runs), strict=False)
        ratios = [rate / base for rate, base in pairs]
        spread = f"{min(rates):,.0f}–{max(rates):,.0f}" if len(rates) > 1 else None
        return {
            "policy": self.label,
            "policy_args": None if self.spec is None else self.spec.as_dict,
            **by_rate[(len(rates) - 1) // 2],
            "ratio_to_first": median(ratios),
            "output_tok_s_all": rates,
            "ratio_to_first_all": ratios,
            "spread": spread,
        }


class Throughput:
    """The runs of one command, in turns over the contestants."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._tokenizer = None
        if args.dataset != _RANDOM:
            self._tokenizer = Tokenizer(checkpoint.tokenizer_path)
        self._workload = self._prompts(args.num_prompts, args.seed)
        self._warmup = self._prompts(args.num_warmups, args.seed + 1) if args.num_warmups else None
        self._pool = pool_for(args, self._workload)
        self._contestants = [
            Contestant(spec.label, spec, partial(self._run_engine, spec)) for spec in policies
        ]
        if args.compare_transformers:
            label = f"transformers, batch {min(args.max_num_seqs, args.num_prompts)}"
            self._contestants.append(Contestant(label, None, self._run_transformers))

    def measure(self) -> None:
        repeat = self._args.repeat
        for turn in range(repeat):
            for contestant in self._contestants:
                title = contestant.label + (f" {turn + 1}/{repeat}" if repeat > 1 else "")
                contestant.runs.append(contestant.run(title))

    def report(self) -> Report:
        args = self._args
        measured = [contestant for contestant in self._contestants if contestant.runs]
        rows = [contestant.row(measured[0]) for contestant in measured]
        settings = {
            name: getattr(args, name)
            for name in ("dataset", "num_prompts", "max_num_seqs", "pool_share", "seed", "repeat")
        }
        settings |= {"model": self._checkpoint.name, "dtype": args.dtype or "auto"}
        settings |= {"demand_blocks": self._pool.demand, **self._pool.settings()}
        if args.dataset == _RANDOM:
            settings |= {name: self._length(name) for name in _LENGTHS}
        about = [
            f"{args.num_prompts} x {args.dataset} (seed {args.seed}) on {self._checkpoint.name}, "
            f"at most {args.max_num_seqs} running",
            self._pool.describe(),
        ]
        return Report("throughput", about, _COLUMNS, rows, settings, notes(rows))

    # ---- what is run --------------------------------------------------------------------------

    def _length(self, name: str) -> int:
        given: int | None = getattr(self._args, name)
        return given or _LENGTHS[name]

    def _prompts(self, count: int, seed: int) -> Workload:
        args = self._args
        if self._tokenizer is not None:
            return task_prompts(args.dataset, count, self._tokenizer, seed)
        lengths = self._length("input_len"), self._length("output_len")
        vocab = self._checkpoint.spec.vocab_size
        return random_prompts(count, *lengths, vocab, seed, args.ignore_eos is not False)

    def _run_engine(self, spec: PolicySpec, title: str) -> Figures:
        args = self._args
        settings = {**self._checkpoint.settings(args), **self._pool.settings()}
        llm = LLM(policy=spec.as_dict, skip_tokenizer_init=self._tokenizer is None, **settings)
        if self._warmup is not None:
            play(llm.engine, self._warmup)
        played = play(llm.engine, self._workload, title, not args.disable_tqdm)
        del llm
        gc.collect()
        return {**played.figures, **accuracy(self._workload, played.answers)}

    def _run_transformers(self, title: str) -> Figures:
        from kvserve.benchmarks.transformers_baseline import generate

        batch = min(self._args.max_num_seqs, self._args.num_prompts)
        with tqdm(
            total=len(self._workload),
            desc=title,
            unit="request",
            disable=True if self._args.disable_tqdm else None,
        ) as bar:
            return generate(
                self._checkpoint.path,
                self._args.dtype or "auto",
                self._tokenizer,
                self._warmup,
                self._workload,
                batch,
                bar,
            )


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must not overlook."""
    found = []
    for row in rows:
        label, ratio = row["policy"], row["ratio_to_first"]
        if row["policy_args"] is None:
            continue
        if row["policy_args"]["name"] != "none" and not row["compactions"]:
            found.append(f"{label}: no event; its budget was never reached")
        elif row is not rows[0] and ratio < 1:
            found.append(f"{label}: {ratio:.2f} of {rows[0]['policy']}; it did not pay here")
        if row["cut_short"]:
            found.append(
                f"{label}: {row['cut_short']} requests ended early, alone in a pool too small "
                "for them"
            )
    return found
