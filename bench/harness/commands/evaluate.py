"""``kvserve eval``: accuracy of policies on shipped tasks and on files, beside the full cache.

Every turn of a task is a chat request that contains the model's own earlier answers. The table
shows beside each score what the policy held: a policy whose budget is never reached scores as the
full cache does, which proves nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness.commands.fidelity import (
    FidelityRun,
    add_fidelity_arguments,
    check_fidelity_arguments,
)
from bench.harness.datasets.datasets import BUILT_TASKS, read_tasks
from bench.harness.datasets.published import FORMATS, SOLVED
from bench.harness.datasets.tasks import default_tasks
from bench.harness.datasets.workload import Source, TaskPrompts, task_prompts
from bench.harness.measuring.benchmark import Benchmark, Comparison, run_benchmark
from bench.harness.measuring.match_bytes import bounds_sequence, target_of, with_budget_of
from bench.harness.measuring.measure import Figures, Played, accuracy, held_bytes, play
from bench.harness.reports.plots import plot_evaluation
from bench.harness.reports.report import Report, Row, columns
from bench.harness.setup.options import (
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    check_complete,
    check_matplotlib,
    chosen_policies,
    number,
)
from bench.harness.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.config import KV_CACHE_DTYPES
from kvserve.engine.core.request_policies import REMEMBERED
from kvserve.engine.policies.base import PolicyError
from kvserve.log import ConfigError

COLUMNS = columns(
    *("task", "policy", "retention", "kv_cache_dtype", "exact_match", "exact_match_error"),
    *("interval_95", "correct_prefix", "score", "n", "answers_each"),
    *("seed", "mean_held_bytes", "held_over_logical_at_end", "allocated_bytes_at_end"),
    *("compactions_per_request", "resumed_turns"),
)
_TRIALS = 8


def add_arguments(
    parser: argparse.ArgumentParser, more_tasks: Mapping[str, Callable[[Source], TaskPrompts]] = {}
) -> None:
    tasks = {**BUILT_TASKS, **more_tasks}
    parser.set_defaults(task_builders=tasks)
    add_engine_arguments(parser, every_policy=True)
    add_report_arguments(parser, plots="accuracy or fidelity against memory")
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=tasks,
        metavar="TASK",
        help=f"some of {', '.join(tasks)} (default: those that a shipped model was trained "
        "for; other models: all but needle-1024-again, terse-chain and long-chain-*; none with "
        "--benchmark)",
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        type=_format_and_file,
        default=[],
        metavar="FORMAT=FILE",
        help="lines of JSON, or a folder of such *.jsonl; "
        + "; ".join(f"{name}: {about}" for name, about in FORMATS.items()),
    )
    words = (
        "longest answer to --benchmark, in tokens (default: the format's own, up to the context)"
    )
    parser.add_argument("--max-new-tokens", type=at_least(1), metavar="N", help=words)
    words = f"{', '.join(SOLVED)}: solved problems in front of each (default: 0)"
    parser.add_argument("--num-fewshot", type=at_least(0), default=0, metavar="N", help=words)
    words = "take them from this file's first lines (default: eight of our own for gsm8k)"
    parser.add_argument("--fewshot-file", type=Path, metavar="FILE", help=words)
    words = "draw answers at this temperature, up to 2 (default: 0, greedy)"
    temperature = number(0, 2, closed=True)
    parser.add_argument("--temperature", type=temperature, default=0.0, metavar="X", help=words)
    words = "from the most probable tokens that together have this probability (default: 1)"
    parser.add_argument("--top-p", type=number(0, 1), default=1.0, metavar="X", help=words)
    words = "answers to each problem: accuracy is their mean (default: 1)"
    parser.add_argument("--n", type=at_least(1), default=1, metavar="N", help=words)
    words = "run each policy once per value, as its ratio; a policy without a ratio, or with a "
    words += "budget, runs once as it is"
    parser.add_argument("--retention", nargs="+", type=number(0, 1), metavar="X", help=words)
    words = "samples per task (default: 100; --fidelity: 8)"
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
    words = "give each sequence as its budget the entries that it held at its end under this policy"
    parser.add_argument("--match-bytes-per-sequence", metavar="POLICY", help=words)
    add_fidelity_arguments(parser)


def _format_and_file(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in FORMATS or not path:
        known = ", ".join(FORMATS)
        raise argparse.ArgumentTypeError(f"{text!r} is not FORMAT=FILE with one of {known}")
    return name, Path(path)


def run(args: argparse.Namespace, graded: type[Benchmark] | None = None) -> int:
    """``graded``: what measures answers that are right or wrong, instead of ``Evaluation``."""
    policies = check_arguments(args)
    kind: type[Benchmark] = FidelityRun if args.fidelity else graded or Evaluation
    return run_benchmark(kind, args, policies)


def check_arguments(args: argparse.Namespace) -> list[PolicySpec]:
    """Refuse what has no meaning together, and fill in defaults; returns the policies."""
    check_fidelity_arguments(args)
    args.benchmark = [
        (name, file)
        for name, path in args.benchmark
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
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
    formats = {name for name, _ in args.benchmark}
    if args.fewshot_file and not args.num_fewshot:
        args.fail("--fewshot-file needs --num-fewshot")
    if args.num_fewshot and not formats & {*SOLVED}:
        args.fail(f"--num-fewshot is for --benchmark {'=, '.join(SOLVED)}=")
    if args.num_fewshot and args.fewshot_file and len(formats) > 1:
        args.fail("--fewshot-file is of one format, and --benchmark names several")
    if args.temperature == 0 and (args.n > 1 or args.top_p < 1):
        flag = "--n" if args.n > 1 else "--top-p"
        args.fail(f"{flag} needs --temperature: greedy answers are all alike")
    graded_files = args.benchmark and not args.fidelity
    other_tasks = set(args.tasks) - set(BUILT_TASKS)
    if args.match_bytes and (graded_files or other_tasks or args.retention):
        args.fail("--match-bytes is for shipped tasks and --fidelity, without --retention")
    policies = policies_by_retention(args)
    if args.match_bytes_per_sequence:
        _check_per_sequence(args, policies)
    check_matplotlib(args)
    return policies


def policies_by_retention(args: argparse.Namespace) -> list[PolicySpec]:
    """The full cache first, then each policy, once per ``--retention`` value if that sets its
    ratio."""
    specs = [NO_COMPRESSION]
    for spec in chosen_policies(args, complete=False):
        if not args.retention or not spec.has_field("ratio") or "budget" in spec.fields:
            specs.append(spec)
        elif "ratio" in spec.fields:
            args.fail(f"--retention sets ratio, and so does --policy {spec.label}: give one")
        else:
            try:
                specs += [spec.with_fields(ratio=value) for value in args.retention]
            except PolicyError as error:
                args.fail(f"--retention: {error}")
    specs = list({spec.label: spec for spec in specs}.values())
    if not (args.match_bytes or args.match_bytes_per_sequence):
        check_complete(args, specs)
    return specs


def _check_per_sequence(args: argparse.Namespace, policies: Sequence[PolicySpec]) -> None:
    """``--match-bytes-per-sequence`` needs a policy that drops, and others with a budget."""
    name = args.match_bytes_per_sequence
    named = [spec for spec in policies if name in (spec.label, spec.name)]
    flag = "--match-bytes-per-sequence"
    if not named or named[0] == NO_COMPRESSION:
        args.fail(f"{flag}: {name!r} is no --policy that drops entries")
    if args.match_bytes or args.retention or args.continuations == "on":
        args.fail(f"{flag} excludes --match-bytes, --retention and --continuations on")
    others = [spec for spec in policies if spec not in (NO_COMPRESSION, named[0])]
    for spec in others:
        if not bounds_sequence(spec):
            args.fail(f"{flag}: policy {spec.name} has no budget that bounds a sequence")
    if not others:
        args.fail(f"{flag} needs another --policy, which gets the budgets")


class Evaluation(Comparison):
    """Every policy on every task; one engine per policy and KV cache dtype."""

    def __post_init__(self) -> None:
        super().__post_init__()
        args, checkpoint = self.args, self.checkpoint
        if not self.tokenizer.has_chat_template:
            raise ConfigError(f"--model: {checkpoint.name} has no chat template")
        self.workloads = {
            task: replace(work, samples=[each for each in work.samples for _ in range(args.n)])
            for task, work in read_tasks(
                args, self.tokenizer, self.longest, args.num_samples
            ).items()
        }
        self._rows: dict[tuple[str, str, str], Row] = {}
        self._pattern = target_of(args.match_bytes_per_sequence, [spec for spec, _ in self.specs])
        self._of_pattern: dict[tuple[str, str], Played] = {}
        self._bytes: dict[tuple[str, str, str], float] = {}

    def measure(self) -> None:
        for spec, stored in sorted(self.specs, key=lambda each: each[0] != self._pattern):
            engine = None
            for task, workload in self.workloads.items():
                title, show = f"{task} {spec.label} {stored}", not self.args.disable_tqdm
                budgets = self._budgets(spec, task, stored)
                if budgets or self.target is not None:
                    engine = None  # frees its pool
                held = partial(self._held, task)
                ran = built = self.matched(spec, stored, self.checkpoint.spec.max_position, held)
                if budgets:
                    built = max(budgets.values(), key=lambda each: int(each.fields["budget"]))
                    ran = PolicySpec(spec.name, {**spec.fields, "budget": "per sequence"})
                if engine is None:
                    engine = self.engines.build(built, kv_cache_dtype=stored)
                settings, at_once = self._settings(budgets), REMEMBERED if budgets else None
                played = play(engine, workload, title, show, settings=settings, at_once=at_once)
                if spec == self._pattern:
                    self._of_pattern[task, stored] = played
                row = self.row(task, ran, stored, played) | held_bytes(engine, played.figures)
                if budgets:
                    row["budgets"] = [each.fields["budget"] for each in budgets.values()]
                self._rows[task, spec.label, stored] = row
            del engine

    def row(self, task: str, spec: PolicySpec, stored: str, played: Played) -> dict[str, Any]:
        row = {
            "task": task,
            "policy": spec.label,
            "policy_args": spec.as_dict,
            "retention": spec.fields.get("ratio"),
            "kv_cache_dtype": stored,
            "seed": self.args.seed,
            **score(self.workloads[task], played, self.args.n),
        }
        if self.args.continuations == "on":
            row["resumed_turns"] = played.figures["resumed_turns"]
        return row

    def _settings(
        self, budgets: Mapping[tuple[int, int], PolicySpec]
    ) -> Callable[[int, int], Mapping[str, Any]]:
        """How answers are drawn, and the policy of each turn where it has one of its own."""
        args = self.args
        drawn = {"temperature": args.temperature, "top_p": args.top_p} if args.temperature else {}

        def settings(index: int, turn: int) -> Mapping[str, Any]:
            own = {"kv_policy": budgets[index, turn].as_dict} if budgets else {}
            return {**drawn, **own, "seed": args.seed + index}

        return settings

    def _budgets(
        self, spec: PolicySpec, task: str, stored: str
    ) -> dict[tuple[int, int], PolicySpec]:
        """With ``--match-bytes-per-sequence``: ``spec`` as each turn of each conversation gets it.

        Its budget is the length of the cache when that turn ended under the other policy.
        """
        if self._pattern is None or spec in (NO_COMPRESSION, self._pattern):
            return {}
        found = {}
        for index, turns in enumerate(self._of_pattern[task, stored].turns):
            for turn, output in enumerate(turns):
                held, prompt = output.kv_cache_details.held_tokens, len(output.prompt_token_ids)
                try:
                    found[index, turn] = with_budget_of(spec, held, prompt, self.longest)
                except PolicyError as error:
                    raise ConfigError(f"--match-bytes-per-sequence: {error}") from None
        return found

    def _held(self, task: str, spec: PolicySpec, stored: str) -> float:
        """Bytes per sequence, on samples that do not count."""
        key = task, spec.label, stored
        if key not in self._bytes:
            workload = task_prompts(task, _TRIALS, self.tokenizer, self.args.seed + 1)
            engine = self.engines.build(spec, kv_cache_dtype=stored)
            figures = play(engine, workload, settings=self._settings({})).figures
            self._bytes[key] = float(held_bytes(engine, figures)["mean_held_bytes"])
        return self._bytes[key]

    def report(self) -> Report:
        args = self.args
        rows = [
            self._rows[key]
            for task in self.workloads
            for spec, stored in self.specs
            if (key := (task, spec.label, stored)) in self._rows
        ]
        settings = self.settings(
            *("tasks", "num_samples", "max_num_seqs", "max_new_tokens", "match_bytes"),
            *("match_bytes_per_sequence", "num_fewshot", "temperature", "top_p", "n"),
        )
        settings["benchmarks"] = [f"{name}={path}" for name, path in args.benchmark]
        answers = "greedy"
        if args.temperature:
            seeds = f"{args.seed} + {args.n} i + j" if args.n > 1 else f"{args.seed} + i"
            answers = f"temperature {args.temperature:g}, top-p {args.top_p:g}, the seed of "
            answers += f"answer{' j' if args.n > 1 else ''} to problem i is {seeds}"
        about = [f"{self.checkpoint.name}; {answers}; interval: Wilson's, over problems"]
        plots = plot_evaluation(rows, args.save_plots) if args.save_plots and rows else []
        notes = [workload.note for workload in self.workloads.values() if workload.note]
        notes += _means(rows, [path.stem for _, path in args.benchmark])
        return Report("eval", about, COLUMNS, rows, settings, notes, plots=plots)


def _means(rows: Sequence[Row], files: Sequence[str]) -> list[str]:
    """Each policy's mean score over several files, as papers print it of LongBench."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row["task"] in files:
            name = f"{row['policy']} in {row['kv_cache_dtype']}"
            scores.setdefault(name, []).append(row["score"])
    return [
        f"mean score over {len(files)} files: {name}: {sum(found) / len(found):.4f}"
        for name, found in scores.items()
        if len(found) == len(files) > 1
    ]


def score(workload: TaskPrompts, played: Played, each: int = 1) -> Figures:
    """Accuracy, with ``each`` answers to a problem, and what the policy held and evicted."""
    every = [turn.kv_cache_details for turns in played.turns for turn in turns]
    compressed = every[0].policy != NO_COMPRESSION.name
    return {
        **accuracy(workload, played.answers, each),
        "compactions_per_request": sum(kv.compactions for kv in every) / len(every)
        if compressed
        else None,
        "requests_compacted": sum(kv.compactions > 0 for kv in every),
        **{
            name: played.figures[name]
            for name in (
                *("requests", "output_tokens", "wall_s", "output_tok_s", "preemptions"),
                "finish_reasons",
                *("held_over_logical_at_end", "held_entries_at_end"),
                *("allocated_bytes_at_end", "codebook_over_coded_at_end"),
            )
        },
    }
