"""Flags that the benchmark commands share: the model, the policies, and how they vary."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvserve.benchmarks.setup.checkpoint import SHAPES
from kvserve.benchmarks.setup.policy_spec import (
    DEFAULT_POLICIES,
    NO_COMPRESSION,
    PolicySpec,
    every_policy,
    policy_spec,
)
from kvserve.config import KV_CACHE_DTYPES, ModelConfig
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import make_policy

_DTYPE = next(flag for flag in fields(ModelConfig) if flag.name == "dtype").metadata
_ALL = PolicySpec("all")
_DTYPE_HELP = f"{', '.join(_DTYPE['choices'])}; auto is float32 on a CPU"


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers >= ``minimum``."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {minimum}")
        return int(text)

    return read


def number(
    above: float, at_most: float = float("inf"), *, closed: bool = False
) -> Callable[[str], float]:
    """A parser of numbers in ``(above, at_most]``, or with ``closed`` in ``[above, at_most]``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (above < value <= at_most or (closed and value == above)):
            least = f"{'[' if closed else '('}{above:g}, {at_most:g}]"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number in {least}")
        return value

    return read


def _dtype(text: str) -> str:
    """A dtype, under one of its names."""
    name = str(_DTYPE["synonyms"].get(text, text))
    if name not in _DTYPE["choices"]:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPE['choices'])}")
    return name


def _policy_or_all(text: str) -> PolicySpec:
    return _ALL if text == _ALL.name else policy_spec(text)


def _json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def file_name(suffix: str) -> Callable[[str], Path]:
    """A parser of names of files to write, which must have this suffix."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix != suffix or path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is not the name of a {suffix} file")
        return path

    return read


# ---- flags ------------------------------------------------------------------------------------


def add_engine_arguments(
    parser: argparse.ArgumentParser,
    policies: Sequence[PolicySpec] = DEFAULT_POLICIES,
    *,
    shapes: bool = False,
    every_policy: bool = False,
) -> None:
    """Flags of the model (with ``shapes`` also built-in ones), policies and their default (with
    ``every_policy`` also ``all``), and engine."""
    count = at_least(1)
    unless_given = " and ".join(spec.label for spec in policies)
    model = parser.add_mutually_exclusive_group()
    default = ModelConfig().model
    words = f"directory or hub id (default: {default})"
    model.add_argument("--model", default=default, metavar="M", help=words)
    if shapes:
        model.add_argument(
            "--shape", choices=SHAPES, help="a model of this size with random weights"
        )
    words = "directory or hub id (default: the model's)"
    parser.add_argument("--tokenizer", metavar="M", help=words)
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy: random weights from config.json alone",
    )
    parser.add_argument(
        "--policy",
        type=_policy_or_all if every_policy else policy_spec,
        action="append",
        metavar="SPEC",
        help="NAME, NAME:FIELD=VALUE,... or JSON, once per policy; if only one policy has fields, "
        "--policy.FIELD VALUE sets them too"
        + ("; all: every policy that has events while decoding" if every_policy else "")
        + (f" (default: {unless_given})" if unless_given else ""),
    )
    parser.add_argument("--policy-args", type=json.loads, metavar="JSON", help=argparse.SUPPRESS)
    _add_cache_arguments(parser)
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=0,
        metavar="N",
        help="seed of prompts and random weights",
    )
    parser.add_argument("--threads", type=count, metavar="N", help="torch threads")
    words = "processes that share the model, each with a GPU of its own, or with CPU cores"
    parser.add_argument("--tensor-parallel-size", "-tp", type=count, metavar="N", help=words)
    words = "let the tokenizer run code from its repository"
    parser.add_argument("--trust-remote-code", action="store_true", default=None, help=words)
    parser.set_defaults(fail=parser.error, default_policies=policies)


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the cache and of a step."""
    count = at_least(1)
    parser.add_argument("--dtype", type=_dtype, metavar="DTYPE", help=_DTYPE_HELP)
    words = "how keys and values are stored (default: auto, in the model's dtype)"
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help=words)
    parser.add_argument(
        "--max-model-len", type=count, metavar="N", help="longest sequence in tokens"
    )
    parser.add_argument("--block-size", type=count, metavar="N", help="tokens per KV block")
    parser.add_argument(
        "--max-num-batched-tokens", type=count, metavar="N", help="most tokens in a step"
    )
    words = "GiB of host memory for preempted sequences"
    parser.add_argument("--swap-space", type=float, metavar="GiB", help=words)
    parser.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse the cache of prompts that begin alike (default: on)",
    )
    words = "guess next tokens, as `kvserve serve` does with the same JSON (default: off)"
    parser.add_argument("--speculative-config", type=_json_object, metavar="JSON", help=words)
    words = "on: later turns go on from the compressed cache of the turn before (default: off)"
    parser.add_argument("--continuations", choices=("off", "on"), help=words)


def add_pool_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--num-gpu-blocks-override",
        "--kv-blocks",
        type=at_least(2),
        metavar="N",
        help="KV blocks in the pool",
    )


def add_compare_speculation_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compare-speculation",
        action="store_true",
        help="run every policy without and with --speculative-config, alternating",
    )


def check_speculation(args: argparse.Namespace) -> None:
    """Refuse to compare what is not given."""
    if args.compare_speculation and not args.speculative_config:
        args.fail("--compare-speculation needs --speculative-config: how tokens are guessed")


def add_retention_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retention",
        nargs="+",
        type=number(0, 1),
        metavar="X",
        help="run each policy once per value, as its ratio; a policy without a ratio, or with a "
        "budget, runs once as it is",
    )


NAMED = Path()
"""``--save-result`` without a name."""


def add_report_arguments(parser: argparse.ArgumentParser, *, named: bool = False) -> None:
    """Where results go besides the terminal. ``named``: JSON has a name without one (``NAMED``)."""
    own: dict[str, Any] = {"nargs": "?", "const": NAMED} if named else {}
    parser.add_argument(
        "--save-result", type=file_name(".json"), metavar="FILE.json", help="write JSON", **own
    )
    parser.add_argument(
        "--save-markdown", type=file_name(".md"), metavar="FILE.md", help="write the printed report"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")


def check_matplotlib(args: argparse.Namespace, flag: str) -> None:
    """Refuse a flag that draws if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        args.fail(f"{flag} needs matplotlib: pip install 'kvserve[bench]'")


# ---- policies ---------------------------------------------------------------------------------


def chosen_policies(args: argparse.Namespace, *, complete: bool = True) -> list[PolicySpec]:
    """The policies asked for; ``--policy.FIELD`` sets fields of the only one that has any.

    ``complete``: refuse policies that lack required fields, because none are added later.
    """
    given = args.policy or args.default_policies
    args.every_policy = _ALL in given
    specs = [each for spec in given for each in (every_policy() if spec == _ALL else [spec])]
    if args.policy_args:
        targets = [i for i, spec in enumerate(specs) if spec.name != NO_COMPRESSION.name]
        if len(targets) != 1:
            args.fail("--policy.FIELD: several policies are given; write --policy NAME:FIELD=VALUE")
        try:
            specs[targets[0]] = specs[targets[0]].with_fields(**args.policy_args)
        except PolicyError as error:
            args.fail(f"--policy.{error.argument}: {error}")
    if complete:
        check_complete(args, specs)
    return specs


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
    finds_budgets = ("match_bytes", "match_bytes_per_sequence")
    if not any(getattr(args, name, None) for name in finds_budgets):
        check_complete(args, specs)
    return specs


def check_complete(args: argparse.Namespace, specs: Sequence[PolicySpec]) -> None:
    """Refuse policies that lack required fields."""
    try:
        for spec in specs:
            make_policy(spec.as_dict)
    except PolicyError as error:
        args.fail(f"--policy: {error}")
