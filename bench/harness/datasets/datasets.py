"""``--dataset`` and the flags of each dataset; the names are vLLM's."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.datasets import published
from bench.harness.datasets.dataset_files import custom, sharegpt, timed_trace
from bench.harness.datasets.tasks import TASKS
from bench.harness.datasets.workload import (
    Conversations,
    Prompts,
    Source,
    TaskPrompts,
    Workload,
    lognormal_lengths,
    random_prompts,
    task_prompts,
)
from bench.harness.setup.options import at_least
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.fields import Setting
from kvserve.flags import add_flag
from kvserve.log import ConfigError

_NO_CAP = 2**20


def _option(
    name: str, default: Any, help: str, kind: type = int, *, also: str = "", **limits: Any
) -> Setting:
    """A flag that belongs to one dataset: a whole number of at least 1 if nothing else is said."""
    limits = limits or ({"least": 1} if kind is int else {})
    return Setting(name, kind, kind, True, default, help, aliases=(also,) * bool(also), **limits)


@dataclass(frozen=True)
class Dataset:
    """A dataset, and how its prompts are made.

    ``text``: the prompts need a tokenizer. ``file``: they come from ``--dataset-path``. ``timed``:
    they have arrival times. ``client``: only `bench serve` can play them, because later prompts
    repeat the answers' token ids. ``ignore_eos``: the default; ``None`` if answers must end by
    themselves.
    """

    build: Callable[[Source], Workload]
    options: tuple[Setting, ...] = ()
    text: bool = False
    file: bool = False
    timed: bool = False
    client: bool = False
    ignore_eos: bool | None = True


def add_dataset_arguments(parser: argparse.ArgumentParser, *, timed: bool = False) -> None:
    """``--dataset``, ``--num-prompts`` and the flags of every dataset; ``timed`` includes those
    that need a running server."""
    datasets = {
        name: each for name, each in DATASETS.items() if timed or not (each.timed or each.client)
    }
    parser.add_argument(
        "--dataset",
        "--dataset-name",
        choices=datasets,
        default="random",
        help="random token ids, prompts of a file, or a shipped task with grades (default: random)",
    )
    words = "file with the prompts"
    parser.add_argument("--dataset-path", type=Path, metavar="FILE", help=words)
    words = "prompts or conversations (default: 100)"
    parser.add_argument("--num-prompts", type=at_least(1), default=100, metavar="N", help=words)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="generate up to the full output length (default: on for random prompts)",
    )
    for name, dataset in datasets.items():
        for option in dataset.options:
            named = replace(option, help=f"{name}: {option.help}")
            add_flag(named, parser, default=None)
    parser.set_defaults(datasets=datasets)


def check_dataset(args: argparse.Namespace) -> None:
    """Refuse flags that the chosen dataset does not know."""
    for name, dataset in args.datasets.items():
        for option in dataset.options:
            if name != args.dataset and getattr(args, option.name) is not None:
                args.fail(f"{option.option} is for --dataset {name}")
    chosen = DATASETS[args.dataset]
    if chosen.file and args.dataset_path is None:
        args.fail(f"--dataset {args.dataset} needs --dataset-path FILE")
    if not chosen.file and args.dataset_path is not None:
        args.fail(f"--dataset-path: --dataset {args.dataset} reads no file")
    if chosen.ignore_eos is None and args.ignore_eos is not None:
        args.fail(f"--ignore-eos: answers of --dataset {args.dataset} end by themselves")
    if chosen.text and getattr(args, "shape", None):
        args.fail(f"--dataset {args.dataset} needs a tokenizer; --shape has none")


def dataset_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen dataset's flags, as given or by default."""
    usual = {option.name: option.default for option in DATASETS[args.dataset].options}
    given = {name: getattr(args, name) for name in usual}
    return usual | {name: value for name, value in given.items() if value is not None}


def read_tasks(
    args: argparse.Namespace, tokenizer: Tokenizer, longest: int, count: int
) -> dict[str, TaskPrompts]:
    """``count`` prompts of each of ``--tasks`` and ``--benchmark``, by name."""
    options = {**vars(args), "longest": longest}
    source = Source(count, args.seed, 0, tokenizer, None, False, options)
    found: dict[str, TaskPrompts] = {task: args.task_builders[task](source) for task in args.tasks}
    for name, path in args.benchmark:
        found[path.stem] = published.read(name, replace(source, path=path))
    return found


def read_dataset(
    args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None
) -> Workload:
    """The prompts that the flags ask for."""
    options = dataset_options(args)
    dataset = DATASETS[args.dataset]
    ignore_eos = bool(dataset.ignore_eos if args.ignore_eos is None else args.ignore_eos)
    count, seed, path = args.num_prompts, args.seed, args.dataset_path
    return dataset.build(Source(count, seed, vocab_size, tokenizer, path, ignore_eos, options))


# ---- the datasets -----------------------------------------------------------------------------


def _random(source: Source) -> Prompts:
    """With a sigma or a cap, prompts of equal length; outputs log-normal as of reasoning models:
    many short, few very long."""
    sigma, cap = source["random_output_sigma"], source["random_output_cap"]
    prompt, output, spread = (
        source[name] for name in ("input_len", "output_len", "random_range_ratio")
    )
    if (sigma or cap) and spread:
        raise ConfigError(
            "--random-range-ratio: --random-output-sigma varies lengths already; give one of them"
        )
    if sigma or cap:
        drawn = np.random.default_rng(source.seed)
        outputs = lognormal_lengths(drawn, source.count, output, sigma, cap or _NO_CAP)
        lengths = [(prompt, length) for length in outputs.tolist()]
    else:
        rng = random.Random(f"lengths/{source.seed}")

        def about(length: int) -> int:
            return rng.randint(max(1, round(length * (1 - spread))), round(length * (1 + spread)))

        lengths = [(about(prompt), about(output)) for _ in range(source.count)]
    return random_prompts(lengths, source.vocab_size, source.seed, source.ignore_eos)


def _prefix_repetition(source: Source) -> Prompts:
    """Prompts that share their beginnings, in random order."""
    rng = random.Random(f"prefixes/{source.seed}")
    vocab, suffix = range(source.vocab_size), source["prefix_repetition_suffix_len"]
    prefixes = [
        rng.choices(vocab, k=source["prefix_repetition_prefix_len"])
        for _ in range(source["prefix_repetition_num_prefixes"])
    ]
    if len(prefixes) > source.count:
        raise ConfigError("--prefix-repetition-num-prefixes must not exceed --num-prompts")
    prompts = [
        prefixes[i % len(prefixes)] + rng.choices(vocab, k=suffix) for i in range(source.count)
    ]
    rng.shuffle(prompts)
    limits = [source["prefix_repetition_output_len"]] * source.count
    return Prompts(prompts, limits, source.ignore_eos)


def conversations(source: Source) -> Conversations:
    """Of agents: one system prompt for all, a question, tool outputs, and time to think."""
    rng = random.Random(f"conversations/{source.seed}")
    vocab, fewest, most = range(source.vocab_size), source["min_turns"], source["max_turns"]
    shortest, longest = source["min_tool_len"], source["max_tool_len"]
    for least, greatest, flags in (
        (fewest, most, "--min-turns and --max-turns"),
        (shortest, longest, "--min-tool-len and --max-tool-len"),
    ):
        if least > greatest:
            raise ConfigError(f"{flags}: the first must not exceed the second")
    system = rng.choices(vocab, k=source["system_len"])
    asked, thinks = [], []
    for _ in range(source.count):
        turns = rng.randint(fewest, most)
        lengths = [
            source["question_len"],
            *(rng.randint(shortest, longest) for _ in range(turns - 1)),
        ]
        new = [rng.choices(vocab, k=length) for length in lengths]
        asked.append([system + new[0], *new[1:]])
        mean = source["think_seconds"]
        thinks.append([0.0, *(rng.expovariate(1 / mean) if mean else 0.0 for _ in new[1:])])
    return Conversations(asked, thinks, source["answer_len"], source.ignore_eos)


def _task(name: str, source: Source) -> TaskPrompts:
    return task_prompts(name, source.count, source.tokenizer, source.seed)


BUILT_TASKS: dict[str, Callable[[Source], TaskPrompts]] = {
    name: partial(_task, name) for name in TASKS
}
DATASETS: dict[str, Dataset] = {
    "random": Dataset(
        _random,
        (
            _option("input_len", 64, "tokens per prompt", also="--random-input-len"),
            _option("output_len", 256, "tokens per output", also="--random-output-len"),
            _option(
                "random_range_ratio", 0.0, "both vary by up to this share", float, least=0, most=1
            ),
            _option(
                "random_output_sigma",
                0.0,
                "answers log-normal around --output-len instead, with this sigma of the logarithm",
                float,
                least=0,
                most=3,
            ),
            _option("random_output_cap", None, "longest of these answers"),
        ),
    ),
    "prefix_repetition": Dataset(
        _prefix_repetition,
        (
            _option("prefix_repetition_prefix_len", 256, "tokens that prompts share"),
            _option("prefix_repetition_suffix_len", 256, "tokens of a prompt's own"),
            _option("prefix_repetition_num_prefixes", 10, "prefixes, shared evenly"),
            _option("prefix_repetition_output_len", 128, "tokens per output"),
        ),
    ),
    "conversations": Dataset(
        conversations,
        (
            _option("system_len", 512, "tokens of the system prompt that all share"),
            _option("question_len", 64, "tokens of a first question"),
            _option("min_turns", 8, "turns of a conversation, at least"),
            _option("max_turns", 20, "turns of a conversation, at most"),
            _option("min_tool_len", 200, "tokens of a later prompt, a tool's output, at least"),
            _option("max_tool_len", 2000, "tokens of a later prompt, at most"),
            _option("answer_len", 128, "tokens per answer"),
            _option(
                "think_seconds",
                2.0,
                "mean time from an answer to the next prompt, exponential",
                float,
                least=0,
            ),
        ),
        client=True,
    ),
    "sharegpt": Dataset(
        sharegpt,
        (_option("sharegpt_output_len", None, "tokens per output, instead of the second turn's"),),
        text=True,
        file=True,
        ignore_eos=False,
    ),
    "custom": Dataset(
        custom,
        (
            _option("custom_output_len", 256, "tokens per output where a line does not say"),
            _option("skip_chat_template", False, "prompts as they are, under no template", bool),
        ),
        text=True,
        file=True,
        ignore_eos=False,
    ),
    "timed_trace": Dataset(
        timed_trace,
        (
            _option("timed_trace_chunk_hash_size", 512, "tokens that one of its hashes stands for"),
            _option(
                "timed_trace_sec_multiplier", 0.001, "seconds in a timestamp of 1", float, above=0
            ),
        ),
        file=True,
        timed=True,
    ),
    **{name: Dataset(build, text=True, ignore_eos=None) for name, build in BUILT_TASKS.items()},
}
