"""What every rank builds of the plan."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvserve.engine.attention.select import Choice
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import SWAP_STAGING_BYTES, KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.pages import keep_freed_memory
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.memory import Profile, free_memory, taken_by
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.runner.padded_step import BOTH_KINDS, StepParts
from kvserve.engine.runner.plan import EnginePlan
from kvserve.kernels.attend.decode_inputs import decode_inputs, select_decode_inputs
from kvserve.late import Late
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.cache_group import CacheGroup, make_groups
from kvserve.scheduler.blocks.swap_memory import num_places

if TYPE_CHECKING:
    from kvserve.engine.cache.row_groups import Shapes
    from kvserve.engine.runner.cuda_graph import DecodeGraphs
    from kvserve.engine.runner.recorded_steps import RecordedSteps

_make_row_group = Late("engine.cache.row_groups:make_row_group")
_decode_graphs = Late("engine.runner.cuda_graph:DecodeGraphs")
_recorded_steps = Late("engine.runner.recorded_steps:RecordedSteps")


@dataclass(frozen=True)
class Pool:
    """Numbers of blocks (``num_blocks`` counts the null block), and the shapes of the tables of
    each cache group."""

    num_blocks: int
    num_host_blocks: int
    table_shapes: tuple[Shapes, ...]

    @classmethod
    def of(cls, num_blocks: int, num_host_blocks: int, groups: Iterable[CacheGroup]) -> Pool:
        """With the tables of ``groups``."""
        shapes = (tuple(table.blocks.shape for table in group.tables) for group in groups)
        return cls(num_blocks, num_host_blocks, tuple(shapes))


def build_runner(
    plan: EnginePlan, model: Transformer, attention: Choice, pool: Pool, group: RankGroup
) -> ModelRunner:
    """The rank's cache and rows."""
    if plan.device == "cpu":
        keep_freed_memory()
    model.tabulate(plan.max_len)
    few = ()
    if plan.form.few:
        by_head, known = plan.policy.demands.rest_bits > 0, model.entry_table
        if known is None or (by_head and known.by_head is None):
            from kvserve.engine.cache.entry_statistics import entry_table

            weights_are_there = plan.config.model.load_format != "dummy"
            model.entry_table = entry_table(model, plan.directory, weights_are_there, by_head)
        few = model.entry_table.layers(plan.form, plan.layout, plan.spec.layers)
    cache = KVCache(
        plan.layout,
        pool.num_blocks,
        plan.log,
        plan.dtype,
        plan.device,
        num_host_blocks=pool.num_host_blocks,
        form=plan.form,
        layers=plan.spec.layers,
        kernels=attention.storage,
        few=few,
    )
    config, spec = plan.config, plan.spec
    rows = config.scheduler.max_num_seqs
    remainders = None
    if attention.backend.reads_remainders:
        places = num_places(rows, continuations=config.cache.continuations == "on")
        full, turned = spec.layers.full or None, cache.entries.turn_remainder
        remainders = Remainders(plan.layout, rows, plan.device, turned, places, full)
    (kv_shape,), (log_shape,), *shapes = pool.table_shapes
    groups = [
        _make_row_group(group_spec, shape, plan.device)
        for group_spec, shape in zip(plan.groups, shapes, strict=True)
    ]
    for made in groups:
        made.attach(cache, model, plan.max_len)
    cache.writers += [made for made in groups if made.writes]
    batch = InputBatch(
        plan.layout,
        rows,
        kv_shape,
        log_shape,
        plan.log_block_tokens,
        spec.vocab_size,
        plan.device,
        groups,
        remainders,
        select_decode_inputs() if plan.device == "cpu" else decode_inputs,
    )
    sizes, _ = plan.graph_sizes(attention)
    guesses = plan.speculation
    most_guesses, most_rows = (0, 1) if guesses is None else (guesses.num_tokens, guesses.most_rows)
    parts = model, cache, batch, attention.backend
    # Where states may be taken back, chunks of guesses are not recorded.
    steps, longest = StepParts(*parts), 1 if spec.states else 1 + most_guesses
    graphs: DecodeGraphs | RecordedSteps | None = None
    alone = config.parallel.tensor_parallel_size == 1 and not config.enforce_eager
    if sizes:
        graphs = _decode_graphs(steps, sizes, longest, most_rows)
    elif alone and attention.name == "cpu" and not spec.borrowed:
        # Without a policy that logs, queries are logged only if a request brings one.
        kinds = BOTH_KINDS if plan.policy.demands.query_reduction else BOTH_KINDS[:1]
        graphs = _recorded_steps(steps, longest, kinds)
    runner = ModelRunner(
        *parts,
        group,
        graphs,
        overlaps=plan.overlaps,
        statistics=plan.statistics,
        most_guesses=most_guesses,
    )
    runner.policies[0] = plan.policy
    return runner


def ready_runner(
    plan: EnginePlan, model: Transformer, attention: Choice, pool: Pool, group: RankGroup
) -> ModelRunner:
    """``build_runner``, warmed up if it is on a GPU."""
    runner = build_runner(plan, model, attention, pool, group)
    if plan.device == "cuda":
        from kvserve.engine.runner.warm_up import warm_up

        warm_up(runner, plan.policy, plan.max_len, plan.config.scheduler.max_num_batched_tokens)
    return runner


def measure(plan: EnginePlan, model: Transformer, attention: Choice, group: RankGroup) -> Profile:
    """The memory left for the pool. On a GPU, the largest step is run to measure it, unless the
    pool's size is given. All ranks call it together."""
    cache, scheduler = plan.config.cache, plan.config.scheduler
    weights = sum(part.numel() * part.itemsize for part in model.parameters())
    if plan.device == "cuda":
        torch.cuda.empty_cache()  # loading leaves about 1 GiB with torch
    left = free_memory(plan.device, cache.gpu_memory_utilization)
    given = cache.num_gpu_blocks_override is not None or cache.kv_cache_memory is not None
    if plan.device != "cuda" or given:
        return Profile(weights, 0, 0, left - sum(group.nbytes for group in plan.groups))
    from kvserve.engine.compression.observer import event_bytes

    tokens = max(scheduler.max_num_batched_tokens, plan.max_observed_tokens)
    step = taken_by(
        lambda: build_runner(plan, model, attention, smallest_pool(plan), group).rehearse(tokens)
    )
    gc.collect()  # graphs and the closures around them refer to each other
    torch.cuda.empty_cache()
    events = event_bytes(plan.layout, plan.max_len) + SWAP_STAGING_BYTES + plan.kept_score_bytes
    return Profile(weights, step, events, left - step - events)


def smallest_pool(plan: EnginePlan) -> Pool:
    """A pool of two blocks, with tables of their final size."""
    rows, logged = plan.config.scheduler.max_num_seqs, plan.log_block_tokens
    groups = make_groups(BlockPool(2), plan.layout, rows, plan.max_len, logged, plan.groups)
    return Pool.of(2, 0, groups)
