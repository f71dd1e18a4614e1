"""Resolve the settings against the model and the machine, and build the engine's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvserve.config import EngineConfig
from kvserve.engine.attention.select import Choice
from kvserve.engine.cache.code_store import check_codes
from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.cache.row_groups import wanted_groups
from kvserve.engine.core.resolve import (
    block_size_of,
    check_policy,
    check_quantization,
    choose_granularity,
    device_of,
    dtype_of,
    entry_form_of,
    log_form_of,
    max_model_len_of,
    max_prefill_tokens_of,
    statistics_of,
)
from kvserve.engine.core.startup_table import (
    Row,
    graphs_row,
    linear_layers_row,
    log_row,
    memory_row,
    plan_rows,
    remainders_row,
    sampling_row,
    scheduling_rows,
    statistics_rows,
)
from kvserve.engine.core.threads import limit_threads
from kvserve.engine.messages import EngineInfo
from kvserve.engine.models.generation import GenerationDefaults, read_generation_config
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.implementation import choose_spec, load
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.engine.policies.triattention import TriAttention
from kvserve.engine.runner.executor import Executor, OtherRanks
from kvserve.engine.runner.memory import (
    Profile,
    check_pool,
    count_blocks,
    count_host_blocks,
    free_memory,
)
from kvserve.engine.runner.rank_plan import Pool, RankPlan, table_shapes
from kvserve.engine.sampling.grammar import check_grammar_backend
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.code_group import CodeSpec
from kvserve.scheduler.blocks.window_group import WindowSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings

NO_TURNS = "no later turn goes on from an earlier one without --continuations on"


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of one engine, and what was decided about them."""

    scheduler: Scheduler
    executor: Executor
    info: EngineInfo
    policy: Policy
    query_reduce: str
    query_dtype: str
    overlaps: bool
    most_kept_scores: int
    """Most scores per head that a policy may keep for each row."""
    has_statistics: bool
    """Whether it is known where the model's queries point."""
    new_scheduler: Callable[[], Scheduler]
    """Builds another scheduler with the same settings and no sequences."""


@dataclass(frozen=True, slots=True)
class _Started:
    """What runs: the scheduler, the ranks and their pool, and the memory that was measured."""

    scheduler: Scheduler
    new_scheduler: Callable[[], Scheduler]
    executor: Executor
    pool: Pool
    profile: Profile


def build_engine(config: EngineConfig, model: Transformer | None = None) -> BuiltEngine:
    """Load the model unless given, size the pool, wire the parts.

    ``ConfigError`` names the flag to change.
    """
    check_grammar_backend(config)
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size (--data-parallel-size): this is one engine, and kvserve serve runs "
            "several; in Python start a process for each"
        )
    device, ranks = device_of(config), config.parallel.tensor_parallel_size
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--tensor-parallel-size: {ranks} ranks need a GPU each, and there are "
            f"{torch.cuda.device_count()}"
        )
    threads = [("cpu threads", *limit_threads(ranks))] if device == "cpu" else []
    plan = _resolved(config, device)
    policy, spec, max_len = plan.policy, plan.spec, plan.max_len
    if device == "cpu":
        check_pool(config, plan.block_bytes, free_memory(device, 1.0), ranks)
    attention = plan.attention(config.attention_backend)
    with ExitStack() as on_failure:
        others = on_failure.enter_context(closing(OtherRanks(plan, ranks, attention.name)))
        started = _start(plan, max_len, attention, others, model)
        on_failure.pop_all()
    use_sampling = config.model.generation_config != "none"
    defaults = read_generation_config(plan.directory, spec, use_sampling=use_sampling)
    info = EngineInfo(
        model_path=str(plan.directory),
        max_model_len=max_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        policy_name=policy.name,
        block_size=plan.layout.block_size,
        num_blocks=started.pool.num_blocks - 1,
        default_sampling=defaults.sampling,
        summary=_summary(plan, started, attention, defaults, threads),
    )
    return BuiltEngine(
        started.scheduler,
        started.executor,
        info,
        policy,
        plan.log.reduction,
        plan.log.dtype,
        plan.overlaps,
        plan.most_score_bytes // plan.score_bytes,
        plan.statistics is not None,
        started.new_scheduler,
    )


def _summary(
    plan: RankPlan,
    started: _Started,
    attention: Choice,
    defaults: GenerationDefaults,
    threads: list[Row],
) -> list[Row]:
    """The start-up table."""
    config, policy, pool, runner = plan.config, plan.policy, started.pool, started.executor.runner
    operators, num_blocks = runner.model.operators, pool.num_blocks - 1
    return [
        *plan_rows(policy, plan, num_blocks, plan.max_len, holding=runner.model.holding),
        log_row(plan.log, plan.device),
        *statistics_rows(policy, plan.statistics),
        memory_row(started.profile),
        remainders_row(runner.batch.remainders, policy),
        ("attention", attention.name, f"{attention.reason}; --attention-backend"),
        graphs_row(*plan.graphs(attention), runner.graphs),
        linear_layers_row(plan.spec, plan.dtype, plan.device),
        ("operators", operators.name, operators.reason),
        *threads,
        *scheduling_rows(plan, pool.num_host_blocks),
        sampling_row(config, defaults),
    ]


def _resolved(config: EngineConfig, device: str) -> RankPlan:
    """What every rank builds of these settings: the model and the policy are looked up."""
    with _naming_flags():
        policy = make_policy({"name": config.compression.policy, **config.compression.policy_args})
    directory = find_model(
        config.model.model,
        config.model.revision,
        config.model.download_dir,
        load_format=config.model.load_format,
        weights=config.model.load_format != "dummy",
        code=config.model.trust_remote_code,
    )
    spec = choose_spec(directory, config.model)
    with _naming_flags():
        layers = len(spec.layers.full) or spec.num_layers
        policy = policy.for_model(layers, block_size_of(config, device))
    check_quantization(config, spec)
    dtype = dtype_of(config, spec, device)
    max_len = max_model_len_of(config, spec)
    check_policy(policy, spec, max_len)
    statistics = statistics_of(policy, spec, directory)
    if isinstance(policy, TriAttention):
        policy = replace(policy, stats=None)  # read once, for requests too
    plan = _plan(config, policy, spec, directory, dtype, device, max_len)
    return replace(plan, statistics=statistics)


def _plan(
    config: EngineConfig,
    policy: Policy,
    spec: ModelSpec,
    directory: Path,
    dtype: torch.dtype,
    device: str,
    max_len: int,
) -> RankPlan:
    """What every rank builds."""
    part = spec.part(config.parallel.tensor_parallel_size)
    block_size, granularity = block_size_of(config, device), choose_granularity(config, policy)
    layers = spec.layers
    layout = KVLayout(
        len(layers.full) or spec.num_layers,
        part.num_kv_heads,
        spec.head_dim,
        block_size,
        granularity,
        holds_entries=bool(layers.full),
    )
    form = entry_form_of(config, spec, dtype, device)
    if policy.expects_turns and config.cache.continuations == "off":
        raise ConfigError(f"--policy.protect_turns: {NO_TURNS}")
    log = log_form_of(config, policy, part, dtype, device)
    try:
        log.block_tokens(layout, form, dtype.itemsize)
    except ValueError as error:
        raise ConfigError(f"--block-size: {error}") from None
    groups = wanted_groups(layout, block_bytes(layout, form))
    if layers.windowed:
        assert spec.window is not None
        chunk = config.scheduler.max_num_batched_tokens
        groups += (WindowSpec(block_size, len(layers.windowed), spec.window, chunk),)
    if writes_codes(policy):
        if form.quantized:
            raise ConfigError(
                f"--kv-cache-dtype {form.name}: {policy.name} codes vectors as they were computed; "
                "use auto, or --policy.codebook false"
            )
        groups += (CodeSpec(check_codes(spec, max_len, block_bytes(layout, form))),)
    shared = config, directory, spec, dtype, device, layout, log, groups
    return RankPlan(*shared, max_len, policy)


def _start(
    plan: RankPlan,
    max_len: int,
    attention: Choice,
    others: OtherRanks,
    model: Transformer | None,
) -> _Started:
    """Load every rank's part of the model, size the pool, and build scheduler and runners."""
    config, group = plan.config, others.join()
    if model is None:
        weights = plan.directory, config.model, plan.spec, plan.dtype, plan.device
        model = load(*weights, group)
    profile = plan.profile(model, attention, group)
    free = others.least_memory(profile.left)
    if plan.device == "cuda":
        check_pool(config, plan.block_bytes, free)
    layout = plan.layout
    most = plan.blocks_for(max_len)
    num_blocks = count_blocks(config, most, plan.block_bytes, free, plan.device)
    layout = replace(layout, num_kv_heads=plan.spec.num_kv_heads)
    num_host_blocks = count_host_blocks(config, block_bytes(layout, plan.form), num_blocks)
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_prefill_tokens=max_prefill_tokens_of(config.scheduler, plan.device),
        max_num_seqs_per_client=config.scheduler.max_num_seqs_per_client,
        max_model_len=max_len,
        log_block_tokens=plan.log_block_tokens,
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        prefix_caching=config.cache.enable_prefix_caching,
        continuations=config.cache.continuations == "on",
        max_continuation_blocks=_blocks_of(config.cache.continuation_memory, plan.block_bytes),
        num_host_blocks=num_host_blocks,
        max_observed_tokens=config.scheduler.max_num_observed_tokens,
        further_groups=plan.groups,
        speculation=plan.speculation,
    )
    new_scheduler = partial(Scheduler, layout, settings)
    scheduler = new_scheduler()
    pool = Pool(num_blocks, num_host_blocks, table_shapes(scheduler.blocks.groups))
    others.build(pool)
    executor = Executor(plan.ready_runner(model, attention, pool, group), others)
    return _Started(scheduler, new_scheduler, executor, pool, profile)


def _blocks_of(memory: int | None, block_bytes: int) -> int | None:
    return None if memory is None else memory // block_bytes


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Turn a policy's errors into ``ConfigError`` that names the command line's flag."""
    try:
        yield
    except PolicyError as error:
        flag = f"--policy.{error.argument}" if error.argument != "name" else "--policy"
        raise ConfigError(f"{flag}: {error}") from None
