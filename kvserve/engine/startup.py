"""Resolve the settings against the model and the machine, and build the engine's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvserve.config import EngineConfig
from kvserve.engine.attention.select import Choice
from kvserve.engine.code_store import check_codes, mask_refusal
from kvserve.engine.executor import Executor, OtherRanks
from kvserve.engine.kv_cache import log_block_tokens
from kvserve.engine.memory import Profile, count_blocks, count_host_blocks
from kvserve.engine.messages import EngineInfo
from kvserve.engine.models.generation import read_generation_config
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.spec import ModelSpec, read_spec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.engine.rank import Pool, RankPlan
from kvserve.engine.startup_table import (
    codes_rows,
    graphs_row,
    linear_layers_row,
    memory_row,
    plan_rows,
    sampling_row,
    scheduling_rows,
)
from kvserve.engine.threads import limit_threads
from kvserve.log import ConfigError
from kvserve.scheduler.gate import BreakEvenGate
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.scheduler import Scheduler

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


def build_engine(config: EngineConfig, model: Transformer | None = None) -> BuiltEngine:
    """Load the model unless given, size the pool, wire the parts.

    ``ConfigError`` names the flag to change.
    """
    with _naming_flags():
        policy = make_policy({"name": config.compression.policy, **config.compression.policy_args})
    device = _device(config)
    ranks = config.parallel.tensor_parallel_size
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--tensor-parallel-size: {ranks} ranks need a GPU each, and there are "
            f"{torch.cuda.device_count()}"
        )
    threads = [("cpu threads", *limit_threads(ranks))] if device == "cpu" else []
    directory = find_model(
        config.model.model,
        config.model.revision,
        config.model.download_dir,
        weights=config.model.load_format != "dummy",
        code=config.model.trust_remote_code,
    )
    spec = read_spec(directory, config.model.hf_overrides)
    block_size = config.cache.block_size or 16
    with _naming_flags():
        policy = policy.for_model(spec.num_layers, block_size)
    _check_quantization(config, spec)
    dtype = _dtype(config, spec, device)
    max_len = _max_model_len(config, spec)
    _check_policy(policy, spec, max_len)
    plan = _plan(config, policy, spec, directory, dtype, device, max_len)
    attention = plan.attention(config.attention_backend)
    codes = codes_rows(plan, attention)
    direct, _ = plan.code_attention(attention)
    if (refusal := mask_refusal(policy, spec, direct=direct)) is not None:
        raise ConfigError(f"--policy.gqa: {refusal}")
    with ExitStack() as on_failure:
        others = on_failure.enter_context(closing(OtherRanks(plan, ranks, attention.name)))
        scheduler, executor, pool, profile = _start(plan, max_len, attention, others, model)
        on_failure.pop_all()
    num_blocks, operators = pool.num_blocks - 1, executor.runner.model.operators
    use_sampling = config.model.generation_config != "none"
    defaults = read_generation_config(directory, spec, use_sampling=use_sampling)
    info = EngineInfo(
        model_path=str(directory),
        max_model_len=max_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        policy_name=policy.name,
        block_size=block_size,
        num_blocks=num_blocks,
        default_sampling=defaults.sampling,
        summary=[
            *plan_rows(policy, plan, num_blocks, max_len, fp8=executor.runner.model.fp8),
            memory_row(profile),
            ("attention", attention.name, f"{attention.reason}; --attention-backend"),
            *codes,
            graphs_row(*plan.graphs(attention)),
            linear_layers_row(dtype, device),
            ("operators", operators.name, operators.reason),
            *threads,
            *scheduling_rows(config, pool.num_host_blocks, overlaps=plan.overlaps),
            sampling_row(config, defaults),
        ],
    )
    reduction, log_dtype = _query_reduction(policy), "fp8" if plan.fp8_log else "model"
    return BuiltEngine(scheduler, executor, info, policy, reduction, log_dtype, plan.overlaps)


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
    block_size, granularity = config.cache.block_size or 16, choose_granularity(config, policy)
    heads = part.num_heads if _query_reduction(policy) == "heads" else part.num_kv_heads
    layout = KVLayout(spec.num_layers, part.num_kv_heads, spec.head_dim, block_size, granularity)
    fp8 = _fp8_log(policy, dtype, device)
    try:
        log_block_tokens(layout, heads, dtype.itemsize if fp8 else 1)
    except ValueError as error:
        raise ConfigError(f"--block-size: {error}") from None
    code_slots = 0
    if not writes_codes(policy) and config.code_attention != "auto":
        raise ConfigError(
            f"--code-attention {config.code_attention}: policy {policy.name} holds no codes; "
            "leave it at auto"
        )
    if writes_codes(policy):
        code_slots = check_codes(spec.rope, max_len, layout.block_elements * dtype.itemsize)
    kept = policy.kept_scores
    shared = config, directory, spec, dtype, device, layout, heads, fp8, code_slots
    return RankPlan(*shared, max_len, kept)


def _start(
    plan: RankPlan,
    max_len: int,
    attention: Choice,
    others: OtherRanks,
    model: Transformer | None,
) -> tuple[Scheduler, Executor, Pool, Profile]:
    """Load every rank's part of the model, size the pool, and build scheduler and runners."""
    config, group = plan.config, others.join()
    if model is None:
        weights = plan.directory, config.model, plan.spec, plan.dtype, plan.device
        model = load_model(*weights, group)
    profile = plan.profile(model, attention, group)
    free = others.least_memory(profile.left)
    layout, itemsize = plan.layout, plan.dtype.itemsize
    num_blocks = count_blocks(config, layout, itemsize, max_len, free, plan.device)
    layout = replace(layout, num_kv_heads=plan.spec.num_kv_heads)
    num_host_blocks = count_host_blocks(config, layout.block_elements * itemsize, num_blocks)
    per_number = itemsize if plan.fp8_log else 1
    scheduler = Scheduler(
        layout,
        num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_len,
        log_block_tokens=log_block_tokens(plan.layout, plan.log_heads, per_number),
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        max_observed_tokens=config.scheduler.max_num_observed_tokens,
        gate=BreakEvenGate() if config.compression.gate == "on" else None,
        code_slots=plan.code_slots,
        code_scratch=not plan.code_attention(attention)[0],
    )
    tables = scheduler.blocks.kv.blocks.shape, scheduler.blocks.log.blocks.shape
    codes = scheduler.blocks.codes
    code_shapes = None if codes is None else (codes.index.blocks.shape, codes.vectors.blocks.shape)
    pool = Pool(num_blocks, num_host_blocks, *tables, code_shapes)
    others.build(pool)
    executor = Executor(plan.runner(model, attention, pool, group), others)
    return scheduler, executor, pool, profile


@contextmanager
def _naming_flags() -> Iterator[None]:
    """A policy's argument is a flag of the command line."""
    try:
        yield
    except PolicyError as error:
        flag = f"--policy.{error.argument}" if error.argument != "name" else "--policy"
        raise ConfigError(f"{flag}: {error}") from None


def _device(config: EngineConfig) -> str:
    has_cuda = torch.cuda.is_available()
    if config.device == "auto":
        return "cuda" if has_cuda else "cpu"
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device; --device cpu runs on the CPU")
    return config.device


def _dtype(config: EngineConfig, spec: ModelSpec, device: str) -> torch.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "float32" if device == "cpu" else spec.dtype
    if name not in _DTYPES:
        raise ConfigError(f"--dtype: config.json asks for {name}; choose {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _check_quantization(config: EngineConfig, spec: ModelSpec) -> None:
    found = None if spec.quantization is None else spec.quantization.method
    if config.model.quantization not in (None, found):
        raise ConfigError(
            f"--quantization: {config.model.quantization} is asked for, but config.json says "
            f"{found or 'nothing of it'}; kvserve reads quantised weights and makes none"
        )


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    # Within its window, a sliding-window layer sees everything, as any other does.
    longest = min(spec.max_position, spec.window or spec.max_position)
    wanted = config.model.max_model_len or longest
    if wanted > longest:
        what = "sliding window of" if longest == spec.window else "longest context,"
        raise ConfigError(f"--max-model-len: {wanted} exceeds the model's {what} {longest} tokens")
    budget = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and budget < wanted:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {wanted} "
            f"(--max-model-len), got {budget}"
        )
    return wanted


def _check_policy(policy: Policy, spec: ModelSpec, max_len: int) -> None:
    if policy.name != "none" and spec.policy_refusal is not None:
        raise ConfigError(f"--policy: {spec.policy_refusal}; use --policy none")
    window = policy.trigger.num_queries
    if window > max_len:
        raise ConfigError(f"--policy.window: {window} exceeds the context of {max_len} tokens")


def choose_granularity(config: EngineConfig, policy: Policy) -> Granularity:
    """The layout that was asked for, or what the policy needs; ``ConfigError`` if it cannot be."""
    auto = config.cache.kv_layout == "auto"
    layout = policy.granularity if auto else Granularity(config.cache.kv_layout)
    if not policy.granularity.fits(layout):
        raise ConfigError(
            f"--kv-layout {layout.value}: policy {policy.name} needs lengths that differ by "
            f"{policy.granularity.value}; choose --kv-layout {policy.granularity.value} or auto"
        )
    if layout is Granularity.HEAD and config.parallel.tensor_parallel_size > 1:
        raise ConfigError(
            "--tensor-parallel-size: with --kv-layout head (adakv, spindlekv) each rank would need "
            "another number of blocks, and there is one pool; use 1, or another policy"
        )
    return layout


def _query_reduction(policy: Policy) -> str:
    """How this engine logs queries, for the policies of requests too."""
    return policy.query_reduction or "group_mean"


def _fp8_log(policy: Policy, dtype: torch.dtype, device: str) -> bool:
    """Whether queries are logged in one byte a number."""
    has_it = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    if policy.logged_dtype == "auto":
        return has_it and dtype is not torch.float32
    if policy.logged_dtype == "fp8" and device == "cuda" and not has_it:
        raise ConfigError(
            "--policy.query_dtype: fp8 needs a GPU of compute capability 8.9 or newer; "
            "choose model or auto"
        )
    return policy.logged_dtype == "fp8"
