"""``kvserve eval``: accuracy of policies on shipped tasks and on files, beside the full cache.

Decoding is greedy. Every turn of a task is a chat request that contains the model's own earlier
answers. The table shows beside each score what the policy held: a policy whose budget is never
reached scores as the full cache does, which proves nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

from kvserve.benchmarks.commands.fidelity import (
    FidelityRun,
    add_fidelity_arguments,
    check_fidelity_arguments,
)
from kvserve.benchmarks.datasets.datasets import read_tasks
from kvserve.benchmarks.datasets.needle_grid import NAME as NEEDLE_GRID
from kvserve.benchmarks.datasets.needle_grid import NeedleGrid
from kvserve.benchmarks.datasets.published import FORMATS
from kvserve.benchmarks.datasets.tasks import TASKS, default_tasks
from kvserve.benchmarks.datasets.workload import TaskPrompts, task_prompts
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.measuring.match_bytes import can_match, matched, target_of
from kvserve.benchmarks.measuring.measure import Figures, Played, accuracy, play
from kvserve.benchmarks.measuring.traffic import held_bytes
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.plots import plot_evaluation
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    KV_CACHE_DTYPES,
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    add_retention_argument,
    at_least,
    check_matplotlib,
    number,
    policies_by_retention,
)
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.engine.policies.base import PolicyError
from kvserve.log import ConfigError

_COLUMNS = columns(
    *("task", "policy", "retention", "kv_cache_dtype", "exact_match", "interval_95"),
    *("correct_prefix", "score", "n"),
    *("seed", "mean_held_bytes", "held_over_logical_at_end", "allocated_bytes_at_end"),
    *("compactions_per_request", "resumed_turns"),
)
_TRIALS = 8
_LENGTHS = [256, 512, 1024, 1536, 2048]
_DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, every_policy=True)
    add_report_arguments(parser)
    names = [*TASKS, NEEDLE_GRID]
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=names,
        metavar="TASK",
        help=f"some of {', '.join(names)} (default: those that a shipped model was trained "
        "for; other models: all but needle-grid, needle-1024-again and long-chain-*; none with "
        "--benchmark)",
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        type=_format_and_file,
        default=[],
        metavar="FORMAT=FILE",
        help="lines of JSON as they are published; "
        + "; ".join(f"{name}: {line}" for name, line in FORMATS.items()),
    )
    words = "longest answer to --benchmark, in tokens (default: the format's own)"
    parser.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=words)
    parser.add_argument(
        "--grid-lengths", nargs="+", type=at_least(256), default=_LENGTHS, metavar="N",
        help=f"{NEEDLE_GRID}: tokens of the texts (default: {' '.join(map(str, _LENGTHS))})",
    )  # fmt: skip
    parser.add_argument(
        "--grid-depths", nargs="+", type=number(0, 1, closed=True), default=_DEPTHS, metavar="X",
        help=f"{NEEDLE_GRID}: where the needle lies, 0 is the beginning "
        f"(default: {' '.join(map(str, _DEPTHS))})",
    )  # fmt: skip
    add_retention_argument(parser)
    words = f"samples per task; {NEEDLE_GRID}: per length and depth (default: 100; --fidelity: 8)"
    parser.add_argument("--num-samples", type=at_least(1), help=words, metavar="N")
    parser.add_argument(
        "--max-num-seqs",
        "--batch",
        type=at_least(1),
        default=32,
        metavar="N",
        help="samples at once (default: 32)",
    )
    add_pool_argument(parser)
    words = f"run every policy with its cache held in each of these: {', '.join(KV_CACHE_DTYPES)}"
    parser.add_argument(
        "--compare-kv-cache-dtypes", nargs="+", metavar="DTYPE", choices=KV_CACHE_DTYPES, help=words
    )
    words = (
        "hold as many bytes per sequence as this: bytes, or one of the policies; the others' "
        f"budgets are found on {_TRIALS} samples of another seed, or another piece of the text"
    )
    parser.add_argument("--match-bytes", metavar="BYTES|POLICY", help=words)
    words = f"draw accuracy or fidelity against memory, and {NEEDLE_GRID}, into this folder"
    parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)
    add_fidelity_arguments(parser)


def _format_and_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in FORMATS or not path:
        formats = ", ".join(FORMATS)
        raise argparse.ArgumentTypeError(f"{text!r} is not FORMAT=FILE with one of {formats}")
    return name, Path(path)


def run(args: argparse.Namespace) -> int:
    check_fidelity_arguments(args)
    args.num_samples = args.num_samples or (8 if args.fidelity else 100)
    if args.tasks is None:
        args.tasks = [] if args.benchmark or args.fidelity else default_tasks(args.model)
    if not args.tasks and not args.benchmark and not args.fidelity:
        args.fail("--tasks: name one, or give --benchmark")
    names = [*args.tasks, *(path.stem for _, path in args.benchmark)]
    if len(set(names)) < len(names):
        args.fail("--benchmark: two files or tasks have the same name")
    if args.max_new_tokens and not args.benchmark:
        args.fail("--max-new-tokens is for --benchmark")
    if args.compare_kv_cache_dtypes and args.kv_cache_dtype:
        args.fail("--compare-kv-cache-dtypes and --kv-cache-dtype exclude each other")
    graded_files = args.benchmark and not args.fidelity
    if args.match_bytes and (graded_files or NEEDLE_GRID in args.tasks or args.retention):
        args.fail("--match-bytes is for shipped tasks and --fidelity, without --retention")
    if args.save_plots:
        check_matplotlib(args, "--save-plots")
    kind: type[Benchmark] = FidelityRun if args.fidelity else Evaluation
    return run_benchmark(kind, args, policies_by_retention(args))


class Evaluation(Benchmark):
    """Every policy on every task; one engine per policy and KV cache dtype."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        tokenizer = checkpoint.tokenizer()
        if not tokenizer.has_chat_template:
            raise ConfigError(f"--model: {checkpoint.name} has no chat template")
        self._grid = NeedleGrid(args.grid_lengths, args.grid_depths, args.num_samples)
        longest = args.max_model_len or checkpoint.spec.max_position
        self._workloads = read_tasks(args, tokenizer, longest, args.num_samples)
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._bytes: dict[str, float] = {}
        self._target = target_of(args.match_bytes, policies)
        self._tokenizer = tokenizer
        self._dtypes: list[str] = args.compare_kv_cache_dtypes or [args.kv_cache_dtype or "auto"]

    def measure(self) -> None:
        for spec, stored in product(self.policies, self._dtypes):
            ran, engine = spec, None
            for task, workload in self._workloads.items():
                title, show = f"{task} {spec.label} {stored}", not self.args.disable_tqdm
                if self._target is not None:
                    engine, ran = None, self._matched(spec, task, stored)
                if engine is None:
                    engine = self.engines.build(ran, kv_cache_dtype=stored)
                played = play(engine, workload, title, show)
                row = {
                    "task": task,
                    "policy": ran.label,
                    "policy_args": ran.as_dict,
                    "retention": spec.fields.get("ratio"),
                    "kv_cache_dtype": stored,
                    "seed": self.args.seed,
                    **score(workload, played),
                }
                if self.args.continuations == "on":
                    row["resumed_turns"] = played.figures["resumed_turns"]
                row |= held_bytes(engine, played.figures)
                if task == NEEDLE_GRID:
                    row["grid"] = self._grid.table(workload.grades(played.answers))
                self._rows[task, spec.label, stored] = row
            del engine

    def _matched(self, spec: PolicySpec, task: str, stored: str) -> PolicySpec:
        """The policy with a budget that holds the target's bytes, on samples that do not count."""
        target = self._target
        assert target is not None
        if spec == target or not can_match(spec):
            return spec
        workload = task_prompts(task, _TRIALS, self._tokenizer, self.args.seed + 1)

        def held(tried: PolicySpec) -> float:
            engine = self.engines.build(tried, kv_cache_dtype=stored)
            figures = play(engine, workload).figures
            return float(held_bytes(engine, figures)["mean_held_bytes"])

        wanted = target if isinstance(target, float) else self._target_bytes(target, task, held)
        try:
            return matched(spec, wanted, self.checkpoint.spec.max_position, held)
        except PolicyError as error:
            raise ConfigError(f"--match-bytes: {error}") from None

    def _target_bytes(
        self, target: PolicySpec, task: str, held: Callable[[PolicySpec], float]
    ) -> float:
        if task not in self._bytes:
            self._bytes[task] = held(target)
        return self._bytes[task]

    def report(self) -> Report:
        args = self.args
        rows = [
            self._rows[each]
            for each in product(
                self._workloads, (spec.label for spec in self.policies), self._dtypes
            )
            if each in self._rows
        ]
        settings = self.settings(
            "tasks", "num_samples", "max_num_seqs", "max_new_tokens", "match_bytes"
        )
        settings["benchmarks"] = [f"{name}={path}" for name, path in args.benchmark]
        about = [f"{self.checkpoint.name}, greedy; interval: Wilson's"]
        plots = plot_evaluation(rows, args.save_plots) if args.save_plots and rows else []
        notes = [workload.note for workload in self._workloads.values() if workload.note]
        return Report("eval", about, _COLUMNS, rows, settings, notes, plots=plots)


def score(workload: TaskPrompts, played: Played) -> Figures:
    """Accuracy, and what the policy held and evicted."""
    every = [turn.kv_cache_details for turns in played.turns for turn in turns]
    compressed = every[0].policy != NO_COMPRESSION.name
    return {
        **accuracy(workload, played.answers),
        "compactions_per_request": sum(kv.compactions for kv in every) / len(every)
        if compressed
        else None,
        "requests_compacted": sum(kv.compactions > 0 for kv in every),
        **{
            name: played.figures[name]
            for name in (
                *("requests", "output_tokens", "wall_s", "output_tok_s", "preemptions"),
                *("held_over_logical_at_end", "held_entries_at_end"),
                *("allocated_bytes_at_end", "codebook_over_coded_at_end"),
            )
        },
    }
