"""``kvserve bench policies``: what one event of each policy costs, in decode steps.

Equally long random prompts start together, so that all sequences have their events in the same
step. An event's time is that of everything between two forwards: scores, choice and moves.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from kvserve.benchmarks.options import (
    SHAPES,
    Checkpoint,
    PolicySpec,
    add_engine_arguments,
    add_report_arguments,
    at_least,
    chosen_policies,
    opened_checkpoint,
)
from kvserve.benchmarks.report import Column, Report, Row, run_and_publish
from kvserve.benchmarks.workload import random_prompts
from kvserve.engine.compressor import Compressor
from kvserve.engine.llm import LLM
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
_COLUMNS = (
    Column("policy", "policy", left=True),
    Column("sequences", "sequences", "d"),
    Column("decode step ms", "decode_step_ms", ".2f"),
    Column("event ms", "event_ms", ".2f"),
    Column("event / step", "event_per_step", ".2f"),
    Column("events per sequence", "events_per_sequence", ".1f"),
    Column("share of decode time", "share_of_time", ".1%"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
    model = add_engine_arguments(parser, _POLICIES)
    add_report_arguments(parser)
    model.add_argument("--shape", choices=SHAPES, help="a Llama of this size with random weights")
    parser.add_argument(
        "--num-seqs",
        nargs="+",
        type=count,
        default=_COUNTS,
        metavar="N",
        help=f"sequences that have their events together (default: {' '.join(map(str, _COUNTS))})",
    )
    for name, tokens in (("input", 256), ("output", 192)):
        words, length = f"tokens of every {name} (default: {tokens})", at_least(2)
        parser.add_argument(f"--{name}-len", type=length, default=tokens, metavar="N", help=words)
    parser.add_argument(
        "--num-gpu-blocks-override", "--kv-blocks", type=at_least(2), metavar="N", help="KV blocks"
    )
    parser.set_defaults(max_num_seqs=None)


def run(args: argparse.Namespace) -> int:
    policies = chosen_policies(args)
    with opened_checkpoint(args, args.shape) as checkpoint:
        costs = EventCosts(args, checkpoint, policies)
        return run_and_publish(costs.measure, costs.report, args.save_result)


class _TimedCompressor:
    """Stands in for an engine's compressor and adds up its seconds, the device's included."""

    def __init__(self, compressor: Compressor) -> None:
        self.seconds = 0.0
        self._compressor = compressor

    def run(self, *task: Any) -> None:
        _finish()
        started = time.perf_counter()
        self._compressor.run(*task)
        _finish()
        self.seconds += time.perf_counter() - started


@dataclass
class _Steps:
    """Seconds of decode steps without their events, and of the events of all sequences at once."""

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


class EventCosts:
    """Every policy with every number of sequences; one engine each, warmed up by a first run."""

    def __init__(
        self, args: argparse.Namespace, checkpoint: Checkpoint, policies: Sequence[PolicySpec]
    ) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._policies = policies
        self._rows: list[Row] = []

    def measure(self) -> None:
        for spec in self._policies:
            for count in self._args.num_seqs:
                self._rows.append(self._measure(spec, count).row(spec, count))

    def report(self) -> Report:
        args = self._args
        names = ("num_seqs", "input_len", "output_len", "seed")
        settings = {name: getattr(args, name) for name in names}
        settings |= {"model": self._checkpoint.name, "dtype": args.dtype or "auto"}
        about = [
            f"random prompts of {args.input_len} tokens and outputs of {args.output_len} on "
            f"{self._checkpoint.name}; medians, one event of every sequence at once"
        ]
        notes = [
            f"{row['policy']}: no step had the events of all {row['sequences']} sequences"
            for row in self._rows
            if row["event_ms"] is None and row["policy_args"]["name"] != "none"
        ]
        return Report("policies", about, _COLUMNS, self._rows, settings, notes)

    def _measure(self, spec: PolicySpec, count: int) -> _Steps:
        args, lengths = self._args, (self._args.input_len, self._args.output_len)
        settings = {
            "max_model_len": sum(lengths),
            "max_num_batched_tokens": max(count * args.input_len, 2048),
            **self._checkpoint.settings(args),
            "max_num_seqs": count,
        }
        llm = LLM(policy=spec.as_dict, skip_tokenizer_init=True, **settings)
        timed = _TimedCompressor(llm.engine.core.runner.compressor)
        llm.engine.core.runner.compressor = timed  # type: ignore[assignment]
        vocab = self._checkpoint.spec.vocab_size
        for seed in (args.seed, args.seed + 1):
            workload = random_prompts(count, *lengths, vocab, seed, True)
            steps = _play(llm, timed, workload.prompts, args.output_len)
        del llm
        gc.collect()
        return steps


def _play(
    llm: LLM, timed: _TimedCompressor, prompts: Sequence[Sequence[int]], output_len: int
) -> _Steps:
    engine, steps = llm.engine, _Steps()
    scheduler = engine.core.scheduler
    booked = scheduler.events
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests:
        events, seconds, started = booked.compactions, timed.seconds, time.perf_counter()
        engine.step()
        spent, seconds = time.perf_counter() - started, timed.seconds - seconds
        if scheduler.rows.num_decoding == len(prompts):
            steps.decode.append(spent - seconds)
        if booked.compactions - events == len(prompts):
            steps.events.append(seconds)
    return steps


def _finish() -> None:
    """Wait for the device, where work is only queued."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
