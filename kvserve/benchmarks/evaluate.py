"""``kvserve eval``: exact match of policies on the shipped tasks, beside the full cache.

Every answer is greedy and every turn of a task is a chat request with the model's own earlier
answers. What a policy really held stands beside its score: a budget never reached proves nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvserve.benchmarks.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.checkpoint import Checkpoint
from kvserve.benchmarks.columns import columns
from kvserve.benchmarks.measure import Figures, Played, accuracy, play
from kvserve.benchmarks.options import (
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    add_retention_argument,
    at_least,
    policies_by_retention,
)
from kvserve.benchmarks.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.benchmarks.report import Report, Row
from kvserve.benchmarks.tasks import TASKS
from kvserve.benchmarks.workload import TaskPrompts, task_prompts
from kvserve.log import ConfigError

_COLUMNS = columns(
    *("task", "policy", "retention", "exact_match", "interval_95", "correct_prefix", "n", "seed"),
    *("held_over_logical_at_end", "compactions_per_request"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    add_report_arguments(parser)
    parser.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        default=list(TASKS),
        metavar="TASK",
        help=f"some of {', '.join(TASKS)} (default: all)",
    )
    add_retention_argument(parser)
    parser.add_argument(
        "--num-samples", type=at_least(1), default=100, help="per task (default: 100)", metavar="N"
    )
    parser.add_argument(
        "--max-num-seqs",
        "--batch",
        type=at_least(1),
        default=32,
        metavar="N",
        help="samples at once (default: 32)",
    )
    add_pool_argument(parser)


def run(args: argparse.Namespace) -> int:
    return run_benchmark(Evaluation, args, policies_by_retention(args))


class Evaluation(Benchmark):
    """Every policy on every task; one engine per policy."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._tokenizer = checkpoint.tokenizer()
        if not self._tokenizer.has_chat_template:
            raise ConfigError(f"--model: {checkpoint.name} has no chat template")
        self._rows: dict[tuple[str, str], Row] = {}

    def measure(self) -> None:
        for spec in self.policies:
            engine = self.engines.build(spec)
            for task in self.args.tasks:
                workload = task_prompts(
                    task, self.args.num_samples, self._tokenizer, self.args.seed
                )
                title, show = f"{task} {spec.label}", not self.args.disable_tqdm
                self._rows[task, spec.label] = {
                    "task": task,
                    "policy": spec.label,
                    "policy_args": spec.as_dict,
                    "retention": spec.fields.get("ratio"),
                    "seed": self.args.seed,
                    **score(workload, play(engine, workload, title, show)),
                }
            del engine

    def report(self) -> Report:
        rows = [
            self._rows[task, spec.label]
            for task in self.args.tasks
            for spec in self.policies
            if (task, spec.label) in self._rows
        ]
        settings = self.settings("tasks", "num_samples", "max_num_seqs")
        about = [f"shipped tasks on {self.checkpoint.name}, greedy; interval: Wilson's"]
        return Report("eval", about, _COLUMNS, rows, settings)


def score(workload: TaskPrompts, played: Played) -> Figures:
    """Accuracy, and what the policy did to the caches."""
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
                "held_over_logical_at_end",
            )
        },
    }
