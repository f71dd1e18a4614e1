"""``kvserve bench policies``: the cost of one event of each policy, in decode steps.

Random prompts of equal length start together, so that all sequences have their events in the same
step. The time of an event is everything between two forwards: scoring, selection and moves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from kvserve.benchmarks.datasets.workload import random_prompts
from kvserve.benchmarks.measuring.benchmark import Benchmark, run_benchmark
from kvserve.benchmarks.reports.columns import columns
from kvserve.benchmarks.reports.report import Report, Row
from kvserve.benchmarks.setup.checkpoint import Checkpoint
from kvserve.benchmarks.setup.options import (
    add_engine_arguments,
    add_pool_argument,
    add_report_arguments,
    at_least,
    chosen_policies,
)
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.sampling_params import SamplingParams

_POLICIES = tuple(
    PolicySpec(name, fields)
    for name, fields in (
        ("kara", {"window": 128, "buffer": 16}),
        ("kara", {"window": 128, "buffer": 16, "query_source": "recompute"}),
        ("snapkv", {"budget": 128}),
        ("chunkkv", {"budget": 128}),
        ("keydiff", {"budget": 128}),
        ("rkv", {"budget": 128}),
        ("streaming_llm", {"budget": 128}),
    )
)
_COUNTS = [1, 16, 64]
_COLUMNS = columns(
    *("policy", "sequences", "decode_step_ms", "event_ms", "event_per_step"),
    *("events_per_sequence", "share_of_time"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, _POLICIES, shapes=True)
    add_report_arguments(parser)
    parser.add_argument(
        "--num-seqs",
        nargs="+",
        type=at_least(1),
        default=_COUNTS,
        metavar="N",
        help=f"sequences whose events come together (default: {' '.join(map(str, _COUNTS))})",
    )
    for name, tokens in (("input", 256), ("output", 192)):
        words, length = f"tokens of every {name} (default: {tokens})", at_least(2)
        parser.add_argument(f"--{name}-len", type=length, default=tokens, metavar="N", help=words)
    add_pool_argument(parser)


def run(args: argparse.Namespace) -> int:
    return run_benchmark(EventCosts, args, chosen_policies(args))


class _EventClock:
    """Adds up the seconds of an engine's events, device time included."""

    def __init__(self, compressor: Compressor) -> None:
        self.seconds = 0.0
        for name in ("run", "observe", "run_observed"):
            setattr(compressor, name, partial(self._time, getattr(compressor, name)))

    def _time(self, call: Callable[..., Any], *task: Any) -> Any:
        _finish()
        started = time.perf_counter()
        result = call(*task)
        _finish()
        self.seconds += time.perf_counter() - started
        return result


@dataclass
class _Steps:
    """Seconds of decode steps less their events, and of the events of steps in which every sequence
    had one."""

    decode: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)

    def row(self, spec: PolicySpec, sequences: int) -> Row:
        step = median(self.decode)
        event = median(self.events) if self.events else None
        return {
            "policy": spec.label,
            "policy_args": spec.as_dict,
            "sequences": sequences,
            "decode_step_ms": 1000 * step,
            "event_ms": None if event is None else 1000 * event,
            "event_per_step": None if event is None else event / step,
            "events_per_sequence": len(self.events),
            "share_of_time": sum(self.events) / (sum(self.events) + sum(self.decode)),
        }


class EventCosts(Benchmark):
    """Every policy with every number of sequences. Each pair has its own engine, which a first run
    warms up."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        super().__init__(args, checkpoint, policies)
        self._rows: list[Row] = []

    def measure(self) -> None:
        for spec in self.policies:
            for count in self.args.num_seqs:
                self._rows.append(self._measure(spec, count).row(spec, count))

    def report(self) -> Report:
        args = self.args
        settings = self.settings("num_seqs", "input_len", "output_len")
        about = [
            f"random prompts of {args.input_len} tokens and outputs of {args.output_len} on "
            f"{self.checkpoint.name}; medians, one event of every sequence at once"
        ]
        notes = [
            f"{row['policy']}: no step had the events of all {row['sequences']} sequences"
            for row in self._rows
            if row["event_ms"] is None and row["policy_args"]["name"] != NO_COMPRESSION.name
        ]
        return Report("policies", about, _COLUMNS, self._rows, settings, notes)

    def _measure(self, spec: PolicySpec, count: int) -> _Steps:
        args, lengths = self.args, (self.args.input_len, self.args.output_len)
        engine = self.engines.build(
            spec,
            skip_tokenizer_init=True,
            max_num_seqs=count,
            max_model_len=args.max_model_len or sum(lengths),
            max_num_batched_tokens=args.max_num_batched_tokens or max(count * lengths[0], 2048),
        )
        timed = _EventClock(engine.core.runner.compressor)
        vocab = self.checkpoint.spec.vocab_size
        for seed in (args.seed, args.seed + 1):
            workload = random_prompts([lengths] * count, vocab, seed)
            steps = _play(engine, timed, workload.prompts, args.output_len)
        return steps


def _play(
    engine: LLMEngine, timed: _EventClock, prompts: Sequence[Sequence[int]], output_len: int
) -> _Steps:
    steps = _Steps()
    scheduler = engine.core.scheduler
    compression = scheduler.events
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests:
        events, seconds, started = compression.compactions, timed.seconds, time.perf_counter()
        engine.step()
        spent, seconds = time.perf_counter() - started, timed.seconds - seconds
        if scheduler.rows.num_decoding == len(prompts):
            steps.decode.append(spent - seconds)
        if compression.compactions - events == len(prompts):
            steps.events.append(seconds)
    return steps


def _finish() -> None:
    """Wait for the device: CUDA work is only queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
