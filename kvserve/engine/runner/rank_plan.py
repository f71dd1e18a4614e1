"""What is decided before a rank loads anything, and how it builds its runner from that."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from kvserve.config import EngineConfig
from kvserve.engine.attention.select import Choice, Needs, select_backend
from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import SWAP_STAGING_BYTES, KVCache
from kvserve.engine.cache.query_log import LogForm
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.cache.row_groups import Shapes, make_row_group
from kvserve.engine.compression.observer import event_bytes
from kvserve.engine.compression.query_statistics import load_statistics
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.pages import keep_freed_memory
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.engine.runner.cuda_graph import DecodeGraphs, capture_sizes
from kvserve.engine.runner.memory import Profile, free_memory, taken_by
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.runner.padded_step import StepParts
from kvserve.engine.runner.recorded_steps import RecordedSteps
from kvserve.engine.runner.warm_up import warm_up
from kvserve.entry_format import EntryFormat, entry_format
from kvserve.kernels.cpu.decode_inputs import select_decode_inputs
from kvserve.kernels.decode_inputs import decode_inputs
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.cache_group import CacheGroup
from kvserve.scheduler.blocks.group_spec import GroupSpec, make_groups
from kvserve.scheduler.blocks.remainder_places import num_places
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.speculation.ngram_index import NgramSettings
from kvserve.scheduler.speculation.speculation import MOST_ROWS

KEPT_SCORE_BYTES = 256 * 1024 * 1024
"""Memory for scores that the policies of requests keep from event to event."""


@dataclass(frozen=True)
class RankPlan:
    """What was decided before anything is loaded; equal on all ranks.

    ``layout`` and ``log`` count the heads of one rank, ``spec`` those of the model.
    ``groups`` are the cache groups beside keys and values and logged queries.
    """

    config: EngineConfig
    directory: Path
    spec: ModelSpec
    dtype: torch.dtype
    device: str
    layout: KVLayout
    log: LogForm
    groups: tuple[GroupSpec, ...]
    max_len: int
    policy: Policy
    """The engine's own; requests may bring others."""
    statistics: Path | None = None
    """The file that says where the model's queries point, if that was measured."""

    @property
    def score_bytes(self) -> int:
        """Memory of one score for each row, layer and head."""
        rows = self.config.scheduler.max_num_seqs
        return 4 * rows * self.layout.num_layers * self.layout.num_kv_heads

    @property
    def most_score_bytes(self) -> int:
        """Memory outside the pool for scores that policies keep, requests' policies included."""
        may_choose = self.config.compression.allow_request_policy != "none"
        return max(self.score_bytes * self.policy.kept_scores, KEPT_SCORE_BYTES * may_choose)

    @property
    def form(self) -> EntryFormat:
        """What an entry is stored as."""
        return entry_format(self.config.cache.kv_cache_dtype, self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one of a rank's blocks."""
        return block_bytes(self.layout, self.form)

    def blocks_for(self, num_tokens: int) -> int:
        """Most blocks of a sequence of ``num_tokens``, logged queries aside."""
        further = sum(group.blocks_for(self.layout, num_tokens) for group in self.groups)
        return self.layout.blocks_for(num_tokens) + further

    @property
    def log_block_tokens(self) -> int:
        """Tokens whose queries one block holds."""
        return self.log.block_tokens(self.layout, self.form, self.dtype.itemsize)

    @property
    def speculation(self) -> NgramSettings | None:
        """How next tokens are guessed, if they are."""
        wanted = self.config.scheduler.speculation
        if wanted is None:
            return None
        lookup = wanted.prompt_lookup_min, wanted.prompt_lookup_max
        most_rows = MOST_ROWS["cpu" if self.device == "cpu" else "cuda"]
        return NgramSettings(wanted.num_speculative_tokens, *lookup, most_rows)

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched before the one in front of it is collected."""
        wanted = self.config.scheduler.async_scheduling
        return self.device == "cuda" if wanted is None else wanted

    def attention(self, name: str) -> Choice:
        dim, layout = self.spec.head_dim, self.layout
        needs = Needs(
            self.device,
            self.dtype,
            dim,
            layout.block_size,
            dim**-0.5,
            per_head=layout.rows > 1,
            log_shares=self.log.dtype == "int4",
            form=self.form.name,
            remainders=self.policy.leaves != "off",
            codes=writes_codes(self.policy),
            windowed=self.spec.windowed,
            sinks=self.spec.sinks,
            soft_cap=self.spec.soft_cap,
        )
        return select_backend(name, needs)

    def runner(
        self, model: Transformer, attention: Choice, pool: Pool, group: RankGroup
    ) -> ModelRunner:
        """The rank's cache and rows."""
        if self.device == "cpu":
            keep_freed_memory()
        model.tabulate(self.max_len)
        cache = KVCache(
            self.layout,
            pool.num_blocks,
            self.log,
            self.dtype,
            self.device,
            num_host_blocks=pool.num_host_blocks,
            form=self.form,
            layers=self.spec.layers,
            store_kv=attention.store_kv,
            store_rotated=attention.store_rotated,
            store_queries=attention.store_queries,
            int4=attention.int4,
            quantized=attention.quantized,
            moves=attention.moves,
        )
        rows = self.config.scheduler.max_num_seqs
        places = num_places(rows, continuations=self.config.cache.continuations == "on")
        remainders = None
        if attention.backend.reads_remainders:
            layers = self.spec.layers.full or None
            remainders = Remainders(self.layout, rows, self.device, places, layers)
        (kv_shape,), (log_shape,), *shapes = pool.table_shapes
        groups = [
            make_row_group(spec, shape, self.device)
            for spec, shape in zip(self.groups, shapes, strict=True)
        ]
        for made in groups:
            made.attach(cache, model, self.max_len)
        cache.writers += [made for made in groups if made.writes]
        fill = select_decode_inputs() if self.device == "cpu" else decode_inputs
        batch = InputBatch(
            self.layout,
            rows,
            kv_shape,
            log_shape,
            cache.query_log.block_tokens,
            self.spec.vocab_size,
            self.device,
            groups,
            remainders,
            fill,
        )
        sizes, _ = self.graphs(attention)
        parts = model, cache, batch, attention.backend
        graphs: DecodeGraphs | RecordedSteps | None = None
        guesses = self.speculation or NgramSettings(0, 1, 1)
        steps, longest = StepParts(*parts), 1 + guesses.num_tokens
        if sizes:
            graphs = DecodeGraphs(steps, sizes, longest, guesses.most_rows)
        elif self.records(attention):
            graphs = RecordedSteps(steps, lambda: cache.on_queries is not None, longest=longest)
        statistics = None if self.statistics is None else load_statistics(self.statistics)
        return ModelRunner(
            *parts,
            group,
            graphs,
            overlaps=self.overlaps,
            statistics=statistics,
            most_guesses=guesses.num_tokens,
        )

    def ready_runner(
        self, model: Transformer, attention: Choice, pool: Pool, group: RankGroup
    ) -> ModelRunner:
        """``runner``, warmed up if it is on a GPU."""
        runner = self.runner(model, attention, pool, group)
        if self.device == "cuda":
            warm_up(runner, self.policy, self.max_len, self.config.scheduler.max_num_batched_tokens)
        return runner

    def records(self, attention: Choice) -> bool:
        """Whether decoding steps may be recorded (``recorded_steps.py``)."""
        alone = self.config.parallel.tensor_parallel_size == 1
        compiled = alone and attention.name == "cpu" and not self.spec.borrowed
        return compiled and not self.config.enforce_eager

    def graphs(self, attention: Choice) -> tuple[list[int], str]:
        """Sizes of the decoding steps that are captured, and why."""
        borrowed = self.spec.borrowed
        return capture_sizes(self.config, self.device, attention, borrowed=borrowed)

    def profile(self, model: Transformer, attention: Choice, group: RankGroup) -> Profile:
        """The memory left for the pool. On a GPU, the largest step is run to measure it, unless
        the pool's size is given.

        All ranks call it together.
        """
        cache, scheduler = self.config.cache, self.config.scheduler
        weights = sum(part.numel() * part.itemsize for part in model.parameters())
        if self.device == "cuda":
            torch.cuda.empty_cache()  # loading leaves about 1 GiB with torch
        left = free_memory(self.device, cache.gpu_memory_utilization)
        given = cache.num_gpu_blocks_override is not None or cache.kv_cache_memory is not None
        if self.device != "cuda" or given:
            return Profile(weights, 0, 0, left)
        tokens = max(scheduler.max_num_batched_tokens, scheduler.max_num_observed_tokens or 0)

        def rehearse() -> None:
            pool = self._smallest_pool()
            self.runner(model, attention, pool, group).rehearse(tokens)

        step = taken_by(rehearse)
        gc.collect()  # graphs and the closures around them refer to each other
        torch.cuda.empty_cache()
        scratch = event_bytes(self.layout, self.max_len)
        events = scratch + SWAP_STAGING_BYTES + self.most_score_bytes
        return Profile(weights, step, events, left - step - events)

    def _smallest_pool(self) -> Pool:
        """A pool of two blocks, with tables of their final size."""
        rows, logged = self.config.scheduler.max_num_seqs, self.log_block_tokens
        made = BlockPool(2), self.layout, rows, self.max_len, logged, self.groups
        return Pool(2, 0, table_shapes(make_groups(*made)))


@dataclass(frozen=True)
class Pool:
    """Numbers of blocks (``num_blocks`` counts the null block), and the shapes of the tables of
    each cache group."""

    num_blocks: int
    num_host_blocks: int
    table_shapes: tuple[Shapes, ...]


def table_shapes(groups: Iterable[CacheGroup]) -> tuple[Shapes, ...]:
    """Of the tables of each group."""
    return tuple(tuple(table.blocks.shape for table in group.tables) for group in groups)
