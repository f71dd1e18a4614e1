"""The base of the benchmark commands that open a checkpoint: they measure, then report."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.measuring.match_bytes import can_match, matched, target_of
from bench.harness.reports.report import Measurement, measure_and_publish
from bench.harness.setup.checkpoint import Engines, MeasuredModel, opened_checkpoint
from bench.harness.setup.policy_spec import PolicySpec, each_as_held
from kvserve.engine.policies.base import PolicyError
from kvserve.log import ConfigError


@dataclass
class Benchmark(Measurement):
    """A measurement on a checkpoint's model."""

    args: argparse.Namespace
    checkpoint: MeasuredModel
    policies: Sequence[PolicySpec]

    def __post_init__(self) -> None:
        self.engines = Engines(self.args, self.checkpoint)

    def as_held(self, policies: Sequence[PolicySpec]) -> list[tuple[PolicySpec, str]]:
        """Each policy with every type that its cache is held in, where a command compares types."""
        args = self.args
        return each_as_held(
            policies, args.compare_kv_cache_dtypes or [args.kv_cache_dtype or "auto"]
        )

    def settings(self, *names: str) -> dict[str, Any]:
        """The named flags and the flags that all commands have, for the JSON file."""
        common = (
            *("seed", "swap_space", "enable_prefix_caching", "kv_cache_dtype"),
            *("continuations", "speculative_config"),
        )
        given = {name: getattr(self.args, name) for name in (*names, *common)}
        given = {name: value for name, value in given.items() if value is not None}
        return {**given, "model": self.checkpoint.name, "dtype": self.args.dtype or "auto"}


class Comparison(Benchmark):
    """Policies on graded answers or on texts, which ``--match-bytes`` lets hold equal bytes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokenizer = self.checkpoint.tokenizer()
        self.longest = self.args.max_model_len or self.checkpoint.spec.max_position
        self.specs = self.as_held(self.policies)
        self.target = target_of(self.args.match_bytes, [spec for spec, _ in self.specs])
        for spec, stored in self.specs:
            if not self.args.every_policy:  # the first runs would be in vain
                given = spec.with_fields(budget=512) if spec.incomplete else spec
                self.engines.check(given, kv_cache_dtype=stored)

    def matched(
        self, spec: PolicySpec, stored: str, most: int, held: Callable[[PolicySpec, str], float]
    ) -> PolicySpec:
        """``spec`` with the budget, at most ``most`` entries, that holds the target's bytes.

        ``held`` measures what a policy holds in a type, on samples that do not count.
        """
        target = self.target
        if target is None or spec == target or not can_match(spec):
            return spec
        if isinstance(target, PolicySpec):
            target = held(target, next(dtype for each, dtype in self.specs if each == target))
        try:
            return matched(spec, target, most, lambda tried: held(tried, stored))
        except PolicyError as error:
            raise ConfigError(f"--match-bytes: {error}") from None


def run_benchmark(
    kind: type[Benchmark], args: argparse.Namespace, policies: Sequence[PolicySpec]
) -> int:
    """Open the checkpoint, measure, print and save; returns the exit status."""
    with opened_checkpoint(args) as checkpoint:
        return measure_and_publish(kind(args, checkpoint, policies), args)
