"""One command's prompts, played on a fresh engine in every run, and the pool that they want."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import ceil
from typing import Any

from kvserve.benchmarks.checkpoint import Checkpoint, Engines
from kvserve.benchmarks.datasets import (
    DATASETS,
    add_dataset_arguments,
    dataset_options,
    read_dataset,
)
from kvserve.benchmarks.measure import Figures, accuracy, play
from kvserve.benchmarks.options import at_least
from kvserve.benchmarks.policy_spec import PolicySpec
from kvserve.benchmarks.workload import DEFAULT_BLOCK_SIZE, blocks_at_once, random_prompts
from kvserve.engine.llm_engine import LLMEngine


def add_traffic_arguments(parser: argparse.ArgumentParser) -> None:
    """The dataset, and how often it is run."""
    add_dataset_arguments(parser)
    words = "random prompts run first, not counted (default: 1)"
    parser.add_argument("--num-warmups", type=at_least(0), default=1, metavar="N", help=words)
    words = "runs of each row, in turns; the median one is shown (default: 1)"
    parser.add_argument("--repeat", type=at_least(1), default=1, metavar="N", help=words)


@dataclass(frozen=True)
class Pool:
    """KV blocks given to an engine (``None``: sized from memory), beside the demand for them."""

    blocks: int | None
    block_size: int
    demand: int

    @property
    def share(self) -> float | None:
        return None if self.blocks is None else self.blocks / self.demand

    def settings(self) -> dict[str, int]:
        size = {"block_size": self.block_size}
        return size if self.blocks is None else {**size, "num_gpu_blocks_override": self.blocks}

    def describe(self) -> str:
        demand = f"demand of {self.demand:,} blocks of {self.block_size} tokens"
        if self.blocks is None:
            return f"pool sized from memory; {demand}"
        return f"pool of {self.blocks:,} blocks, {self.share:.2f} of the {demand}"


def entry_bytes(engine: LLMEngine) -> int:
    """Bytes of one key and its value, of one layer and head."""
    cache = engine.core.runner.cache
    return 2 * cache.layout.head_dim * cache.kv.element_size()


class Traffic:
    """The workload of ``--dataset``; ``run`` has a warm-up of random prompts before it."""

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

    def pool(self, blocks: int | None = None, share: float | None = None) -> Pool:
        """A pool of so many blocks, or of a share of the demand."""
        if share is not None:
            blocks = max(2, ceil(share * self.demand))
        return Pool(blocks, self.block_size, self.demand)

    def run(
        self, spec: PolicySpec, title: str, *, pool: Pool, show: bool = True, **settings: Any
    ) -> Figures:
        """The figures of one run on an engine of its own; ``show`` draws a bar of its requests."""
        settings |= {**pool.settings(), "skip_tokenizer_init": self.tokenizer is None}
        engine = self._engines.build(spec, **settings)
        if self.warmup is not None:
            play(engine, self.warmup)
        played = play(engine, self.workload, title, show and not self._args.disable_tqdm)
        held = played.figures["held_entries_at_end"] * entry_bytes(engine)
        graded = accuracy(self.workload, played.answers)
        return {**played.figures, "held_bytes_at_end": held, **graded}

    def settings(self) -> dict[str, Any]:
        return {
            **{name: getattr(self._args, name) for name in ("dataset", "num_prompts", "repeat")},
            "demand_blocks": self.demand,
            **dataset_options(self._args),
        }
