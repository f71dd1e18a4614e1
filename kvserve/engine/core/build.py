"""Build the engine's parts of a plan: the model, the pool, the ranks, the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

from kvserve.config import EngineConfig
from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.messages import EngineInfo, Row
from kvserve.engine.models.generation import read_generation_config
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.executor import Executor
from kvserve.engine.runner.memory import (
    GIB,
    check_length,
    check_pool,
    count_blocks,
    count_host_blocks,
    free_memory,
    limit_threads,
)
from kvserve.engine.runner.plan import EnginePlan, make_plan
from kvserve.engine.runner.rank import Pool, measure, ready_runner
from kvserve.late import Late
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings

_ranks = Late("engine.runner.ranks:Ranks")
_start_up_table = Late("engine.core.start_up_table:start_up_table")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of one engine, and the plan that they were built of."""

    plan: EnginePlan
    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    summary: Callable[[], list[Row]]
    """Makes the start-up table."""


Tell = Callable[[str], None]


def untold(_: str) -> None:
    """Tell nobody."""


def build_engine(
    config: EngineConfig, model: Transformer | None = None, tell: Tell = untold
) -> BuiltEngine:
    """Load the model unless given, size the pool, wire the parts, and ``tell`` what is being done.

    ``ConfigError`` names the flag to change.
    """
    tell("reading the model's config and choosing kernels")
    plan, ranks = make_plan(config), config.parallel.tensor_parallel_size
    config = plan.config
    threads = [("cpu threads", *limit_threads(ranks))] if plan.device == "cpu" else []
    free = free_memory(plan.device, 1.0)
    if plan.device == "cpu":
        check_pool(config.cache, plan.block_bytes, free, ranks)
    check_length(plan.max_len, plan.spec.head_dim, config.scheduler.max_num_seqs, free)
    attention = plan.attention(config.attention_backend)
    with ExitStack() as on_failure:
        executor: Executor = Executor() if ranks == 1 else _ranks(plan, ranks, attention.name)
        on_failure.enter_context(closing(executor))
        group = executor.join()
        if model is None:
            weights = plan.directory, config.model, plan.spec, plan.dtype, plan.device
            tell("reading the weights")
            model = load_model(*weights, group)
        tell("preparing the cache and the first steps")
        profile = measure(plan, model, attention, group)
        layout, settings = _sizes(plan, executor.least_memory(profile.left))
        scheduler = Scheduler(layout, settings)
        groups = scheduler.blocks.groups
        pool = Pool.of(settings.num_blocks, settings.num_host_blocks, groups)
        executor.build(pool)
        executor.runner = ready_runner(plan, model, attention, pool, group)
        on_failure.pop_all()
    use_sampling = config.model.generation_config != "none"
    defaults = read_generation_config(plan.directory, plan.spec, use_sampling=use_sampling)
    info = EngineInfo(
        model_path=str(plan.directory),
        max_model_len=plan.max_len,
        vocab_size=plan.spec.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        policy_name=plan.policy.name,
        block_size=plan.layout.block_size,
        num_blocks=pool.num_blocks - 1,
        default_sampling=defaults.sampling,
        prefix_caching=config.cache.enable_prefix_caching,
    )
    parts = plan, pool, executor.runner, profile, attention, defaults, threads
    return BuiltEngine(plan, scheduler, executor, info, partial(_start_up_table, *parts))


def _sizes(plan: EnginePlan, free: int) -> tuple[KVLayout, SchedulerSettings]:
    """What the scheduler is told: at least ``free`` bytes of every rank are for the pool."""
    config, scheduler = plan.config, plan.config.scheduler
    # Ranks on a CPU share its memory.
    usual = min(GIB, free // (4 * config.parallel.tensor_parallel_size))
    if plan.device == "cuda":
        check_pool(config.cache, plan.block_bytes, free)
        usual = free
    usable = scheduler.max_num_seqs * plan.blocks_for(plan.max_len, logged=True)
    num_blocks = count_blocks(config.cache, usable, plan.block_bytes, usual)
    layout = replace(plan.layout, num_kv_heads=plan.spec.num_kv_heads)  # of all ranks
    kept = config.cache.continuation_memory
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_prefill_tokens=plan.max_prefill_tokens,
        max_num_seqs_per_client=scheduler.max_num_seqs_per_client,
        max_model_len=plan.max_len,
        log_block_tokens=plan.log_block_tokens,
        chunked_prefill=scheduler.enable_chunked_prefill,
        prefix_caching=config.cache.enable_prefix_caching,
        continuations=config.cache.continuations == "on",
        max_continuation_blocks=None if kept is None else kept // plan.block_bytes,
        num_host_blocks=count_host_blocks(config.cache, block_bytes(layout, plan.form), num_blocks),
        max_observed_tokens=plan.max_observed_tokens,
        further_groups=plan.groups,
        speculation=plan.speculation,
    )
    return layout, settings
