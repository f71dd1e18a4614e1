"""Where prompts come from: ``--dataset`` and the flags of each; the names are vLLM's."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvserve.benchmarks.options import at_least, number
from kvserve.benchmarks.tasks import TASKS
from kvserve.benchmarks.workload import Prompts, Workload, random_prompts, task_prompts
from kvserve.engine.tokenizer import Tokenizer

_COUNT = at_least(1)


@dataclass(frozen=True)
class Source:
    """What a dataset is made of: how many prompts, from which seed, and its flags."""

    count: int
    seed: int
    vocab_size: int
    tokenizer: Tokenizer | None
    ignore_eos: bool
    options: Mapping[str, Any]

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


@dataclass(frozen=True)
class Option:
    """A flag that belongs to one dataset."""

    name: str
    default: Any
    help: str
    read: Callable[[str], Any] = _COUNT
    also: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Dataset:
    """How its prompts are made. ``text``: they need a tokenizer, and answers end by themselves."""

    build: Callable[[Source], Workload]
    options: tuple[Option, ...] = ()
    text: bool = False


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """``--dataset``, ``--num-prompts`` and the flags of every dataset."""
    parser.add_argument(
        "--dataset",
        "--dataset-name",
        choices=DATASETS,
        default="random",
        help="token ids made up, or a shipped task, graded (default: random)",
    )
    words = "conversations (default: 100)"
    parser.add_argument("--num-prompts", type=at_least(1), default=100, metavar="N", help=words)
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="made-up outputs have their full length (default: on)",
    )
    for name, dataset in DATASETS.items():
        for option in dataset.options:
            names = filter(None, (option.flag, option.also))
            words = f"{name}: {option.help} (default: {option.default})"
            parser.add_argument(*names, type=option.read, metavar="N", help=words)


def check_dataset(args: argparse.Namespace) -> None:
    """Refuse flags that the chosen dataset does not know."""
    for name, dataset in DATASETS.items():
        for option in dataset.options:
            if name != args.dataset and getattr(args, option.name) is not None:
                args.fail(f"{option.flag} is for --dataset {name}")
    if DATASETS[args.dataset].text:
        if args.ignore_eos is not None:
            args.fail(f"--ignore-eos: answers of --dataset {args.dataset} end by themselves")
        if getattr(args, "shape", None):
            args.fail(f"--dataset {args.dataset} needs a tokenizer, which --shape has not")


def dataset_options(args: argparse.Namespace) -> dict[str, Any]:
    """The chosen dataset's flags, as given or by default."""
    given = {option: getattr(args, option.name) for option in DATASETS[args.dataset].options}
    return {
        option.name: option.default if value is None else value for option, value in given.items()
    }


def read_dataset(
    args: argparse.Namespace, vocab_size: int, tokenizer: Tokenizer | None
) -> Workload:
    """The prompts that the flags ask for."""
    options = dataset_options(args)
    ignore_eos = args.ignore_eos is not False
    source = Source(args.num_prompts, args.seed, vocab_size, tokenizer, ignore_eos, options)
    return DATASETS[args.dataset].build(source)


# ---- the datasets -----------------------------------------------------------------------------


def _random(source: Source) -> Prompts:
    rng, spread = random.Random(f"lengths/{source.seed}"), source["random_range_ratio"]

    def about(length: int) -> int:
        return rng.randint(max(1, round(length * (1 - spread))), round(length * (1 + spread)))

    lengths = [
        (about(source["input_len"]), about(source["output_len"])) for _ in range(source.count)
    ]
    return random_prompts(lengths, source.vocab_size, source.seed, source.ignore_eos)


def _prefix_repetition(source: Source) -> Prompts:
    """Prompts that share their beginnings, in random order."""
    rng = random.Random(f"prefixes/{source.seed}")
    vocab, suffix = range(source.vocab_size), source["prefix_repetition_suffix_len"]
    prefixes = [
        rng.choices(vocab, k=source["prefix_repetition_prefix_len"])
        for _ in range(source["prefix_repetition_num_prefixes"])
    ]
    prompts = [
        prefixes[i % len(prefixes)] + rng.choices(vocab, k=suffix) for i in range(source.count)
    ]
    rng.shuffle(prompts)
    limits = [source["prefix_repetition_output_len"]] * source.count
    return Prompts(prompts, limits, source.ignore_eos)


def _task(name: str, source: Source) -> Workload:
    assert source.tokenizer is not None
    return task_prompts(name, source.count, source.tokenizer, source.seed)


DATASETS: dict[str, Dataset] = {
    "random": Dataset(
        _random,
        (
            Option("input_len", 64, "tokens per prompt", also="--random-input-len"),
            Option("output_len", 256, "tokens per output", also="--random-output-len"),
            Option("random_range_ratio", 0.0, "both vary by up to this share", number(-1e-9, 1)),
        ),
    ),
    "prefix_repetition": Dataset(
        _prefix_repetition,
        (
            Option("prefix_repetition_prefix_len", 256, "tokens that prompts share"),
            Option("prefix_repetition_suffix_len", 256, "tokens of a prompt's own"),
            Option("prefix_repetition_num_prefixes", 10, "prefixes, shared evenly"),
            Option("prefix_repetition_output_len", 128, "tokens per output"),
        ),
    ),
    **{name: Dataset(partial(_task, name), text=True) for name in TASKS},
}
