"""``kvserve eval``: exact match of policies on the shipped tasks, beside the full cache.

Every answer is greedy and every turn of a task is a chat request with the model's own earlier
answers. What a policy really held stands beside its score: a budget never reached proves nothing.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from math import sqrt
from typing import Any

from kvserve.benchmarks.measure import Figures, Played, accuracy, play
from kvserve.benchmarks.options import (
    NO_COMPRESSION,
    Checkpoint,
    PolicySpec,
    add_engine_arguments,
    add_report_arguments,
    at_least,
    check_complete,
    chosen_policies,
    fraction,
    opened_checkpoint,
)
from kvserve.benchmarks.report import Column, Report, Row, run_and_publish
from kvserve.benchmarks.tasks import TASKS
from kvserve.benchmarks.workload import TaskPrompts, task_prompts
from kvserve.engine.llm import LLM
from kvserve.engine.policies.base import PolicyError
from kvserve.log import ConfigError

_Z95 = 1.959963984540054


def _compactions(mean: float) -> str:
    return f"{mean:.2f}" if mean else "never reached"


_COLUMNS = (
    Column("task", "task", left=True),
    Column("policy", "policy", left=True),
    Column("retention", "retention", "g"),
    Column("exact match", "exact_match", ".3f"),
    Column("95% interval", "interval_95", lambda bounds: "{:.3f}–{:.3f}".format(*bounds)),
    Column("correct prefix", "correct_prefix", ".3f"),
    Column("n", "n", "d"),
    Column("seed", "seed", "d"),
    Column("held/logical", "held_over_logical_at_end", ".3f"),
    Column("events per request", "compactions_per_request", _compactions),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
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
    parser.add_argument(
        "--retention",
        nargs="+",
        type=fraction,
        metavar="X",
        help="run each policy once per value, as its ratio; policies without one run once",
    )
    parser.add_argument(
        "--num-samples", type=count, default=100, help="per task (default: 100)", metavar="N"
    )
    parser.add_argument(
        "--max-num-seqs",
        "--batch",
        type=count,
        default=32,
        metavar="N",
        help="samples at once (default: 32)",
    )
    parser.add_argument(
        "--num-gpu-blocks-override", "--kv-blocks", type=at_least(2), metavar="N", help="KV blocks"
    )


def run(args: argparse.Namespace) -> int:
    policies = _with_retention(args, chosen_policies(args, complete=False))
    check_complete(args, policies)
    with opened_checkpoint(args) as checkpoint:
        evaluation = Evaluation(args, checkpoint, policies)
        return run_and_publish(evaluation.measure, evaluation.report, args.save_result)


def _with_retention(args: argparse.Namespace, chosen: Sequence[PolicySpec]) -> list[PolicySpec]:
    """The full cache first, then each policy, once per retention if it has a ratio."""
    specs = [NO_COMPRESSION]
    for spec in chosen:
        if not args.retention or not spec.has_field("ratio"):
            specs.append(spec)
        elif "ratio" in spec.fields:
            args.fail(f"--retention sets ratio, and so does --policy {spec.label}: give one")
        else:
            try:
                specs += [spec.with_fields(ratio=value) for value in args.retention]
            except PolicyError as error:
                args.fail(f"--retention: {error}")
    return list({spec.label: spec for spec in specs}.values())


class Evaluation:
    """Every policy on every task; one engine per policy."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._policies = policies
        self._rows: dict[tuple[str, str], Row] = {}

    def measure(self) -> None:
        args = self._args
        for spec in self._policies:
            llm = LLM(policy=spec.as_dict, **self._checkpoint.settings(args))
            if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
                raise ConfigError(f"--model: {self._checkpoint.name} has no chat template")
            for task in args.tasks:
                workload = task_prompts(task, args.num_samples, llm.tokenizer, args.seed)
                played = play(llm.engine, workload, f"{task} {spec.label}", not args.disable_tqdm)
                self._rows[task, spec.label] = {
                    "task": task,
                    "policy": spec.label,
                    "policy_args": spec.as_dict,
                    "retention": spec.fields.get("ratio"),
                    "seed": args.seed,
                    **score(workload, played),
                }
            del llm
            gc.collect()

    def report(self) -> Report:
        args = self._args
        rows = [
            self._rows[task, spec.label]
            for task in args.tasks
            for spec in self._policies
            if (task, spec.label) in self._rows
        ]
        settings: dict[str, Any] = {
            "model": self._checkpoint.name,
            "tasks": args.tasks,
            "num_samples": args.num_samples,
            "max_num_seqs": args.max_num_seqs,
            "dtype": args.dtype or "auto",
            "seed": args.seed,
        }
        about = [f"shipped tasks on {self._checkpoint.name}, greedy; interval: Wilson's"]
        return Report("eval", about, _COLUMNS, rows, settings)


def score(workload: TaskPrompts, played: Played) -> Figures:
    """Accuracy with its interval, and what the cache held when each conversation ended."""
    right = accuracy(workload, played.answers)
    last = [turns[-1].kv_cache_details for turns in played.turns]
    every = [turn.kv_cache_details for turns in played.turns for turn in turns]
    compressed = last[0].policy != NO_COMPRESSION.name
    return {
        **right,
        "interval_95": wilson_interval(right["exact"], right["n"]),
        "held_over_logical_at_end": sum(kv.held_tokens for kv in last)
        / sum(kv.logical_tokens for kv in last),
        "compactions_per_request": sum(kv.compactions for kv in every) / len(every)
        if compressed
        else None,
        "requests_compacted": sum(kv.compactions > 0 for kv in every),
        **{
            name: played.figures[name]
            for name in ("requests", "output_tokens", "wall_s", "output_tok_s", "preemptions")
        },
    }


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """95% interval of a proportion; it behaves at 0 and 1, where the normal one has no width."""
    p, z2 = successes / n, _Z95**2
    centre, spread = p + z2 / (2 * n), _Z95 * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (centre - spread) / (1 + z2 / n), (centre + spread) / (1 + z2 / n)
    return max(0.0, low), min(1.0, high)
