"""Flags that the benchmark commands share: the model, the policies, and how they vary."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness.setup.checkpoint import ENGINE_FLAGS, SHAPES
from bench.harness.setup.policy_spec import (
    DEFAULT_POLICIES,
    NO_COMPRESSION,
    PolicySpec,
    every_policy,
    policy_spec,
)
from kvserve.config import SETTINGS
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.flags import add_flag, number_reader
from kvserve.folders import install

_ALL = PolicySpec("all")


def at_least(minimum: int) -> Callable[[str], int]:
    """A parser of whole numbers >= ``minimum``."""
    return number_reader(int, least=minimum)


def number(
    above: float, at_most: float | None = None, *, closed: bool = False
) -> Callable[[str], float]:
    """A parser of numbers in ``(above, at_most]``, or with ``closed`` in ``[above, at_most]``."""
    return number_reader(float, **{"least" if closed else "above": above}, most=at_most)


def _policy_or_all(text: str) -> PolicySpec:
    return _ALL if text == _ALL.name else policy_spec(text)


def file_name(*suffixes: str, folder_exists: bool = False) -> Callable[[str], Path]:
    """A parser of names of files to write, with one of these suffixes, maybe in a folder that
    exists."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix not in suffixes or path.is_dir():
            either = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
            raise argparse.ArgumentTypeError(f"{text!r} is not the name of a {either} file")
        if folder_exists and not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
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
    unless_given = " and ".join(spec.label for spec in policies)
    model = parser.add_mutually_exclusive_group()
    add_flag(SETTINGS["model"], model, default=SETTINGS["model"].default)
    if shapes:
        model.add_argument(
            "--shape", choices=SHAPES, help="a model of this size with random weights"
        )
    add_flag(SETTINGS["load_format"], parser, default="auto")
    parser.add_argument(
        "--policy",
        type=_policy_or_all if every_policy else policy_spec,
        action="append",
        metavar="SPEC",
        help="NAME, NAME:FIELD=VALUE,... or JSON, once per policy (@k8v4 at its end: with its "
        "cache held so); if only one policy has fields, --policy.FIELD VALUE sets them too"
        + ("; all: every policy that has events while decoding" if every_policy else "")
        + (f" (default: {unless_given})" if unless_given else ""),
    )
    add_setting_flags(parser, "policy_args", "tokenizer", *ENGINE_FLAGS)
    words = "seed of prompts and random weights"
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help=words)
    parser.add_argument("--threads", type=at_least(1), metavar="N", help="torch threads")
    parser.set_defaults(fail=parser.error, default_policies=policies)


def add_setting_flags(parser: argparse._ActionsContainer, *names: str) -> None:
    """Flags of these settings of ``kvserve serve``; one that is not given is ``None``, and the
    engine's default holds."""
    for name in names:
        add_flag(SETTINGS[name], parser, default=None)


def add_pool_argument(parser: argparse._ActionsContainer) -> None:
    add_flag(SETTINGS["num_gpu_blocks_override"], parser, "--kv-blocks", default=None)


NAMED = Path()
"""``--save-result`` without a name."""


def add_report_arguments(
    parser: argparse.ArgumentParser, *, named: bool = False, plots: str = ""
) -> None:
    """Where results go besides the terminal. ``named``: JSON has a name without one (``NAMED``);
    ``plots``: what is drawn, if anything is."""
    own: dict[str, Any] = {"nargs": "?", "const": NAMED} if named else {}
    parser.add_argument(
        "--save-result", type=file_name(".json"), metavar="FILE.json", help="write JSON", **own
    )
    parser.add_argument(
        "--save-markdown", type=file_name(".md"), metavar="FILE.md", help="write the printed report"
    )
    if plots:
        words = f"draw {plots} into this folder"
        parser.add_argument("--save-plots", type=Path, metavar="FOLDER", help=words)
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")


def check_matplotlib(args: argparse.Namespace, name: str = "save_plots") -> None:
    """Refuse a flag that draws if matplotlib is not installed."""
    if getattr(args, name) and importlib.util.find_spec("matplotlib") is None:
        args.fail(f"--{name.replace('_', '-')} needs matplotlib: {install('bench')}")


# ---- policies ---------------------------------------------------------------------------------


def chosen_policies(args: argparse.Namespace, *, complete: bool = True) -> list[PolicySpec]:
    """The policies asked for; ``--policy.FIELD`` sets fields of the only one that has any.

    ``complete``: refuse policies that lack required fields, because none are added later.
    """
    if getattr(args, "compare_kv_cache_dtypes", None) and args.kv_cache_dtype:
        args.fail("--compare-kv-cache-dtypes and --kv-cache-dtype exclude each other")
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


def check_complete(args: argparse.Namespace, specs: Sequence[PolicySpec]) -> None:
    """Refuse policies that lack required fields."""
    try:
        for spec in specs:
            make_policy(spec.as_dict)
    except PolicyError as error:
        args.fail(f"--policy: {error}")
