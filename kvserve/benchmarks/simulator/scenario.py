"""What is simulated: a model on a device with a pool, and the lengths of its requests."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kvserve.benchmarks.setup.lengths import lognormal_lengths
from kvserve.benchmarks.setup.options import at_least
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel, Device
from kvserve.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig, SchedulerConfig
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec, parse_spec
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.group_spec import GroupSpec
from kvserve.scheduler.blocks.window_group import WindowSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.setting_values import read_size

_BLOCK_SIZE = 16
_LENGTHS = {"input": (250, 4096), "output": (2000, 8192)}  # mean and cap, in tokens
_SIGMA = 0.7
_REQUESTS = 4  # per sequence that may run at once


@dataclass(frozen=True)
class Scenario:
    """``prompts`` and ``outputs`` are lengths in tokens ``[n]``; ``model`` and ``device`` are
    display names."""

    model: str
    device: str
    cost: CostModel
    pool_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    prompts: IntArray
    outputs: IntArray

    @property
    def layout(self) -> KVLayout:
        spec = self.cost.spec
        layers = len(spec.layers.full)
        return KVLayout(layers, spec.num_kv_heads, spec.head_dim, self.block_size)

    def scheduler(self, log_block_tokens: int) -> Scheduler:
        """A new scheduler; prompts share nothing, so prefix caching is off."""
        settings = SchedulerSettings(
            num_blocks=self.pool_tokens // self.block_size + 1,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=int((self.prompts + self.outputs).max()),
            log_block_tokens=log_block_tokens,
            prefix_caching=False,
            further_groups=self._windows(),
        )
        return Scheduler(self.layout, settings)

    def _windows(self) -> tuple[GroupSpec, ...]:
        spec = self.cost.spec
        if not spec.windowed:
            return ()
        assert spec.window is not None
        sizes = len(spec.windowed), spec.window, self.max_num_batched_tokens
        return (WindowSpec(self.block_size, *sizes),)

    def describe(self) -> list[str]:
        return [
            f"{self.model} on {self.device}, pool of {self.pool_tokens:,} tokens of "
            f"{self.cost.entry_bytes:,} bytes ({self.cost.form.name}), at most "
            f"{self.max_num_seqs} running",
            f"{len(self.prompts):,} requests, prompts {_describe(self.prompts)}, outputs "
            f"{_describe(self.outputs)}",
        ]


def _describe(lengths: IntArray) -> str:
    return f"{lengths.mean():,.0f} on average and {lengths.max():,} at most"


# ---- flags --------------------------------------------------------------------------------------


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="M", help="directory or hub id; config.json is enough")
    model.add_argument("--shape", choices=LARGE_SHAPES, help="the shape of a known model")
    words = "card whose sustained rates are assumed; the next three flags replace single rates"
    parser.add_argument("--device", choices=DEVICES, required=True, help=words)
    for name, unit, reader, words in (
        ("bandwidth", "TB/s", _above_zero, "memory bandwidth that the card sustains"),
        ("gemm-tflops", "X", _above_zero, "TFLOP/s that matrix products sustain"),
        ("event-overhead-ms", "MS", _from_zero, "fixed cost of the events of a step"),
    ):
        parser.add_argument(f"--{name}", type=reader, metavar=unit, help=words)
    words = "how keys and values are stored (default: auto, as they are computed)"
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help=words)
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--kv-cache-memory",
        type=_size,
        metavar="SIZE",
        help="size of the pool, as in 40GiB (default: 0.9 of the device's memory less the weights)",
    )
    pool.add_argument(
        "--kv-cache-tokens", type=count, metavar="N", help="size of the pool in tokens"
    )
    for name, value, words in (
        ("max-num-seqs", SchedulerConfig().max_num_seqs, "most running at once"),
        ("max-num-batched-tokens", SchedulerConfig().max_num_batched_tokens, "most in a step"),
        ("block-size", _BLOCK_SIZE, "tokens per KV block"),
    ):
        words += f" (default: {value})"
        parser.add_argument(f"--{name}", type=count, default=value, metavar="N", help=words)
    _add_lengths(parser)


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    count = at_least(1)
    words = 'lines like {"prompt": 250, "output": 1800}, one per request; replaces the flags below'
    parser.add_argument("--lengths", type=Path, metavar="FILE.jsonl", help=words)
    words = f"requests, all there from the start (default: {_REQUESTS} times --max-num-seqs)"
    parser.add_argument("--num-requests", type=count, metavar="N", help=words)
    for name, (mean, cap) in _LENGTHS.items():
        words = f"tokens per {name}, log-normal (default: {mean})"
        parser.add_argument(f"--{name}-len-mean", type=count, default=mean, metavar="N", help=words)
        words = f"longest {name} (default: {cap})"
        parser.add_argument(f"--{name}-len-cap", type=count, default=cap, metavar="N", help=words)
    words = f"standard deviation of the lengths' logarithms (default: {_SIGMA}; 0: equal lengths)"
    parser.add_argument("--len-sigma", type=_from_zero, default=_SIGMA, metavar="X", help=words)
    parser.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="seed of the lengths"
    )


def _from_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number >= 0")
    return value


def _above_zero(text: str) -> float:
    if not _from_zero(text):
        raise argparse.ArgumentTypeError("must be above 0")
    return float(text)


def _size(text: str) -> int:
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# ---- reading the flags --------------------------------------------------------------------------


def read_scenario(args: argparse.Namespace) -> Scenario:
    """The scenario of these flags; names the flag and ends the command where they do not fit."""
    limits = {name: getattr(args, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    EngineConfig.from_flat(**limits, block_size=args.block_size)  # refuses what an engine would
    device = _device(args)
    cost = CostModel(_spec(args), device, args.kv_cache_dtype)
    if (refusal := cost.form.refusal(cost.spec.head_dim)) is not None:
        args.fail(f"--kv-cache-dtype {args.kv_cache_dtype}: {refusal}")
    if args.kv_cache_dtype == "fp8" and not device.fp8:
        args.fail(f"--kv-cache-dtype fp8: {args.device} has no such numbers")
    rates = f"{device.bandwidth / 1e12:g} TB/s, {device.gemm / 1e12:g} TFLOP/s"
    prompts, outputs = _lengths(args, cost.spec.max_position)
    return Scenario(
        model=args.shape or args.model,
        device=f"{args.device} ({rates})",
        cost=cost,
        pool_tokens=_pool_tokens(args, cost),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        prompts=prompts,
        outputs=outputs,
    )


def _device(args: argparse.Namespace) -> Device:
    device = DEVICES[args.device]
    if args.bandwidth:
        rate = args.bandwidth * 1e12
        device = replace(device, bandwidth=rate, attention_bandwidth=rate)
    if args.gemm_tflops:
        rate = args.gemm_tflops * 1e12
        device = replace(device, gemm=rate, scoring=rate / 2)
    if args.event_overhead_ms is not None:
        device = replace(device, event_overhead=args.event_overhead_ms / 1e3)
    return device


def _spec(args: argparse.Namespace) -> ModelSpec:
    if args.shape:
        return parse_spec(LARGE_SHAPES[args.shape], args.shape)
    spec = choose_spec(find_model(args.model, weights=False), ModelConfig())
    if spec.policy_refusal is not None:
        args.fail(f"--model: {spec.policy_refusal}")
    return spec


def _pool_tokens(args: argparse.Namespace, cost: CostModel) -> int:
    if args.kv_cache_tokens:
        return int(args.kv_cache_tokens)
    memory = args.kv_cache_memory
    if memory is None:
        memory = int(0.9 * cost.device.memory - cost.weights_bytes)
        if memory < 0:
            args.fail(
                f"--device: its memory does not hold {cost.weights_bytes / 2**30:.1f} GiB of "
                "weights; --kv-cache-memory simulates a pool on several such cards"
            )
    if memory < 2 * args.block_size * cost.entry_bytes:
        args.fail(
            f"--kv-cache-memory: {max(memory, 0):,} bytes do not hold two blocks of "
            f"{args.block_size} tokens, at {cost.entry_bytes:,} bytes a token"
        )
    return memory // cost.entry_bytes


def _lengths(args: argparse.Namespace, longest: int) -> tuple[IntArray, IntArray]:
    """Prompts and outputs, in tokens."""
    if args.lengths is not None:
        prompts, outputs = _read_lengths(args)
        where = "--lengths"
    else:
        rng = np.random.default_rng(args.seed)
        prompts, outputs = (
            lognormal_lengths(
                rng,
                args.num_requests or _REQUESTS * args.max_num_seqs,
                getattr(args, f"{name}_len_mean"),
                args.len_sigma,
                getattr(args, f"{name}_len_cap"),
            )
            for name in _LENGTHS
        )
        where = "--output-len-cap"
    total = int((prompts + outputs).max())
    if total > longest:
        args.fail(f"{where}: {total} tokens with the prompt exceed the model's {longest}")
    return prompts, outputs


def _read_lengths(args: argparse.Namespace) -> tuple[IntArray, IntArray]:
    try:
        lines = args.lengths.read_text().splitlines()
    except OSError as error:
        args.fail(f"--lengths: cannot read {args.lengths}: {error.strerror}")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            request = json.loads(line)
            pair = request["prompt"], request["output"]
            if not all(type(length) is int and length > 0 for length in pair):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            words = 'is not like {"prompt": 250, "output": 1800}, whole numbers from 1 on'
            args.fail(f"--lengths: line {number} of {args.lengths} {words}")
        found.append(pair)
    if not found:
        args.fail(f"--lengths: {args.lengths} is empty")
    prompts, outputs = np.array(found, np.int32).T
    return prompts, outputs
