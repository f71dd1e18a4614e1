"""The base of the benchmark commands that open a checkpoint: they measure, then report."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvserve.benchmarks.reports.report import Report, measure_and_publish
from kvserve.benchmarks.setup.checkpoint import Checkpoint, Engines, opened_checkpoint
from kvserve.benchmarks.setup.policy_spec import PolicySpec, each_as_held


class Benchmark(ABC):
    """A ``Measurement`` on a checkpoint's model."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        self.args = args
        self.checkpoint = checkpoint
        self.policies = policies
        self.engines = Engines(args, checkpoint)

    @abstractmethod
    def measure(self) -> None: ...

    @abstractmethod
    def report(self) -> Report: ...

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


def run_benchmark(
    kind: type[Benchmark], args: argparse.Namespace, policies: Sequence[PolicySpec]
) -> int:
    """Open the checkpoint, measure, print and save; returns the exit status."""
    with opened_checkpoint(args) as checkpoint:
        return measure_and_publish(kind(args, checkpoint, policies), args)
