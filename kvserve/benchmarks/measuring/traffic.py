"""The prompts of a command, played on a fresh engine in every run, and the pool that they need."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from kvserve.benchmarks.datasets.datasets import (
    DATASETS,
    add_dataset_arguments,
    dataset_options,
    read_dataset,
)
from kvserve.benchmarks.datasets.workload import DEFAULT_BLOCK_SIZE, blocks_at_once, random_prompts
from kvserve.benchmarks.measuring.measure import CLOCKS, Figures, accuracy, play
from kvserve.benchmarks.setup.checkpoint import Checkpoint, Engines
from kvserve.benchmarks.setup.options import at_least
from kvserve.benchmarks.setup.policy_spec import NO_COMPRESSION, PolicySpec
from kvserve.engine.cache.remainders import remainder_bytes
from kvserve.engine.frontend.llm_engine import LLMEngine


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """The dataset, and how often it is run."""
    add_dataset_arguments(parser)
    words = "random prompts run first, not counted (default: 1)"
    parser.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N", help=words)
    words = "wall: wall-clock seconds; cpu: CPU seconds of this process, for a busy machine; "
    words += "with --threads 1 both agree on an idle one (default: wall)"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=words)
    words = "runs of each row, in turns; the median one is shown (default: 1)"
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help=words)


@dataclass(frozen=True)
class PoolSize:
    """KV blocks given to an engine (``None``: sized from memory), beside the demand for them."""

    blocks: int | None
    block_size: int
    demand: int
    same_bytes: bool = False
    """Whether ``blocks`` counts blocks of the full cache in the model's dtype; every policy then
    gets as many bytes, in blocks of its own layout and dtype."""

    @property
    def share(self) -> float | None:
        return None if self.blocks is None else self.blocks / self.demand

    def settings(self) -> dict[str, int]:
        size = {"block_size": self.block_size}
        return size if self.blocks is None else {**size, "num_gpu_blocks_override": self.blocks}

    def bytes(self, block_bytes: int) -> int:
        """Bytes of the pool, including the null block."""
        assert self.blocks is not None
        return (self.blocks + 1) * block_bytes

    def describe(self) -> str:
        demand = f"demand of {self.demand:,} blocks of {self.block_size} tokens"
        if self.blocks is None:
            return f"pool sized from memory; {demand}"
        return f"pool of {self.blocks:,} blocks, {self.share:.2f} of the {demand}"


def entry_bytes(engine: LLMEngine) -> int:
    """Bytes of one key and its value, of one layer and head."""
    cache = engine.core.runner.cache
    return cache.form.entry_bytes(cache.layout.head_dim)


def pool_bytes(engine: LLMEngine) -> int:
    """Bytes of all blocks, including the null block."""
    return engine.core.runner.cache.kv.nbytes


def held_bytes(engine: LLMEngine, figures: Figures) -> Figures:
    """Bytes per sequence: of its entries when it ends, and of its blocks as a mean over the run.

    The mean is all blocks in use (keys, values, logged queries) over all running
    sequences, and what stands for dropped entries at a sequence's end. Scores are not in it,
    because they are freed when an event ends. Nor are blocks in host memory, which are not in the
    pool.
    """
    used = figures["mean_pool_usage"] * pool_bytes(engine)
    cache = engine.core.runner.cache
    lanes = cache.layout.num_layers * cache.layout.num_kv_heads
    each = remainder_bytes(cache.layout) / lanes
    remainders = figures["remainder_entries_at_end"] * each
    return {
        "held_bytes_at_end": figures["held_entries_at_end"] * entry_bytes(engine) + remainders,
        "pool_bytes": pool_bytes(engine),
        "mean_held_bytes": used / figures["mean_running"] + remainders,
    }


class Traffic:
    """The workload of ``--dataset``; ``run`` first plays a warm-up of random prompts."""

    def __init__(self, args: argparse.Namespace, checkpoint: Checkpoint, engines: Engines) -> None:
        self._args = args
        self._engines = engines
        vocab = checkpoint.spec.vocab_size
        self.tokenizer = checkpoint.tokenizer() if DATASETS[args.dataset].text else None
        self.workload = read_dataset(args, vocab, self.tokenizer)
        self.warmup = None
        if args.num_warmups:
            prompt = self.workload.prompt(0, [])
            assert prompt is not None
            lengths = [(len(prompt), self.workload.max_tokens(0))] * args.num_warmups
            self.warmup = random_prompts(lengths, vocab, args.seed + 1)
        self.block_size = args.block_size or DEFAULT_BLOCK_SIZE
        self.demand = blocks_at_once(self.workload, self.block_size)

    def pool(self, blocks: int | None = None, share: float | None = None) -> PoolSize:
        """A pool of ``blocks`` blocks, or of a ``share`` of the demand."""
        if share is not None:
            blocks = max(2, ceil(share * self.demand))
        return PoolSize(blocks, self.block_size, self.demand, same_bytes=share is not None)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block of the full cache in the model's dtype."""
        engine = self._engines.build(
            NO_COMPRESSION,
            kv_cache_dtype="auto",
            num_gpu_blocks_override=2,
            block_size=self.block_size,
            skip_tokenizer_init=True,
        )
        return pool_bytes(engine) // (engine.stats().blocks_total + 1)

    def run(self, spec: PolicySpec, title: str, *, pool: PoolSize, **settings: Any) -> Figures:
        """The figures of one run on an engine of its own."""
        settings |= {**pool.settings(), "skip_tokenizer_init": self.tokenizer is None}
        if pool.same_bytes:
            del settings["num_gpu_blocks_override"]
            settings["kv_cache_memory"] = pool.bytes(self.block_bytes)
        engine = self._engines.build(spec, **settings)
        if self.warmup is not None:
            play(engine, self.warmup)
        shown, clock = not self._args.disable_tqdm, CLOCKS[self._args.clock]
        played = play(engine, self.workload, title, shown, clock)
        held = held_bytes(engine, played.figures)
        return {**played.figures, **held, **accuracy(self.workload, played.answers)}

    def describe(self) -> str:
        """The traffic in words; with the lengths of answers, unless these end by themselves."""
        args, workload = self._args, self.workload
        text = f"{args.num_prompts} x {args.dataset} (seed {args.seed})"
        if args.clock == "cpu":
            text = f"per second of CPU time, on a busy machine: {text}"
        if not workload.ignore_eos:
            return text
        limits = [workload.max_tokens(index) for index in range(len(workload))]
        prompt = workload.prompt(0, [])
        assert prompt is not None
        mean = sum(limits) / len(limits)
        spread = f"{min(limits):,} to {max(limits):,} tokens, {mean:,.0f} on average"
        if min(limits) == max(limits):
            spread = f"{max(limits):,} tokens"
        return f"{text}, prompts of {len(prompt):,} tokens, answers of {spread},"

    def settings(self) -> dict[str, Any]:
        return {
            **{
                name: getattr(self._args, name)
                for name in ("dataset", "num_prompts", "repeat", "clock")
            },
            "demand_blocks": self.demand,
            **dataset_options(self._args),
        }
