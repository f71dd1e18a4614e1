"""Resolve the settings against the model and the machine, and build the engine's parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvserve.config import EngineConfig
from kvserve.engine.attention.select import Needs, select_backend
from kvserve.engine.input_batch import InputBatch
from kvserve.engine.kv_cache import KVCache, log_block_tokens
from kvserve.engine.messages import EngineInfo
from kvserve.engine.model_runner import ModelRunner
from kvserve.engine.models.generation import GenerationDefaults, read_generation_config
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.linear import can_pack
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.spec import ModelSpec, read_spec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.threads import limit_threads
from kvserve.log import ConfigError
from kvserve.scheduler.gate import BreakEvenGate
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.scheduler import Scheduler

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GIB = 1024**3
_LAYOUT_MEANS = {
    Granularity.MODEL: "all layers and heads hold equally many entries",
    Granularity.LAYER: "layers may hold different numbers of entries",
    Granularity.HEAD: "layers and KV heads may hold different numbers of entries",
}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The parts of one engine, and what was decided about them."""

    scheduler: Scheduler
    runner: ModelRunner
    info: EngineInfo
    policy: Policy
    query_reduce: str
    query_dtype: str


def build_engine(config: EngineConfig, model: Transformer | None = None) -> BuiltEngine:
    """Load the model unless given, size the pool, wire the parts.

    ``ConfigError`` names the flag to change.
    """
    with _naming_flags():
        policy = make_policy({"name": config.compression.policy, **config.compression.policy_args})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = [("cpu threads", *limit_threads())] if device == "cpu" else []
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
    query_reduce = policy.query_reduction or "group_mean"
    fp8 = _fp8_log(policy, dtype, device)
    layout = KVLayout(
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        block_size,
        _granularity(config, policy),
    )
    log_heads = spec.num_heads if query_reduce == "heads" else spec.num_kv_heads
    try:
        log_tokens = log_block_tokens(layout, log_heads, dtype.itemsize if fp8 else 1)
    except ValueError as error:
        raise ConfigError(f"--block-size: {error}") from None
    needs = Needs(device, dtype, spec.head_dim, layout.block_size, spec.head_dim**-0.5)
    attention = select_backend(config.attention_backend, needs)
    model = model or load_model(directory, config.model, spec, dtype, device)
    num_blocks = _num_blocks(config, layout, max_len, dtype, device)
    num_host_blocks = _num_host_blocks(config, layout.block_elements * dtype.itemsize, num_blocks)
    scheduler = Scheduler(
        layout,
        num_blocks,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_len,
        log_block_tokens=log_tokens,
        chunked_prefill=config.scheduler.enable_chunked_prefill,
        prefix_caching=config.cache.enable_prefix_caching,
        num_host_blocks=num_host_blocks,
        max_observed_tokens=config.scheduler.max_num_observed_tokens,
        gate=BreakEvenGate() if config.compression.gate == "on" else None,
    )
    tables = scheduler.blocks.kv.blocks.shape, scheduler.blocks.log.blocks.shape
    max_rows = config.scheduler.max_num_seqs
    batch = InputBatch(layout, max_rows, *tables, log_tokens, spec.vocab_size, device)
    cache = KVCache(
        layout,
        num_blocks,
        log_heads,
        dtype,
        device,
        fp8_log=fp8,
        num_host_blocks=num_host_blocks,
        store_kv=attention.store_kv,
    )
    runner = ModelRunner(model, cache, batch, attention.backend)
    use_sampling = config.model.generation_config != "none"
    defaults = read_generation_config(directory, spec, use_sampling=use_sampling)
    info = EngineInfo(
        model_path=str(directory),
        max_model_len=max_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=defaults.eos_token_ids,
        policy_name=policy.name,
        block_size=layout.block_size,
        num_blocks=num_blocks - 1,
        default_sampling=defaults.sampling,
        summary=[
            *_summary(config, policy, spec, layout, num_blocks, max_len, dtype, device),
            ("attention", attention.name, f"{attention.reason}; --attention-backend"),
            ("linear layers", *_linear_layers(dtype, device)),
            ("operators", model.operators.name, model.operators.reason),
            *threads,
            *_scheduling_summary(config, num_host_blocks),
            _sampling_row(config, defaults),
        ],
    )
    return BuiltEngine(scheduler, runner, info, policy, query_reduce, "fp8" if fp8 else "model")


@contextmanager
def _naming_flags() -> Iterator[None]:
    """A policy's argument is a flag of the command line."""
    try:
        yield
    except PolicyError as error:
        flag = f"--policy.{error.argument}" if error.argument != "name" else "--policy"
        raise ConfigError(f"{flag}: {error}") from None


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


def _granularity(config: EngineConfig, policy: Policy) -> Granularity:
    """The layout that was asked for, or what the policy needs."""
    if config.cache.kv_layout == "auto":
        return policy.granularity
    layout = Granularity(config.cache.kv_layout)
    if not policy.granularity.fits(layout):
        raise ConfigError(
            f"--kv-layout {layout.value}: policy {policy.name} needs lengths that differ by "
            f"{policy.granularity.value}; choose --kv-layout {policy.granularity.value} or auto"
        )
    return layout


def _fp8_log(policy: Policy, dtype: torch.dtype, device: str) -> bool:
    """Whether queries are logged in one byte a number."""
    if policy.logged_dtype != "auto":
        return policy.logged_dtype == "fp8"
    has_it = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    return has_it and dtype is not torch.float32


def _num_blocks(
    config: EngineConfig, layout: KVLayout, max_len: int, dtype: torch.dtype, device: str
) -> int:
    """Blocks of the pool, the null block included; never more than could be used at once."""
    if config.cache.num_gpu_blocks_override is not None:
        return config.cache.num_gpu_blocks_override + 1
    memory = config.cache.kv_cache_memory
    if memory is None:
        memory = _default_memory(config, device)
    block_bytes = layout.block_elements * dtype.itemsize
    affordable = memory // block_bytes
    if affordable < 2:
        raise ConfigError(
            f"--kv-cache-memory: {memory} bytes do not hold two blocks of {block_bytes} bytes"
        )
    usable = config.scheduler.max_num_seqs * layout.blocks_for(max_len) * 2
    return int(min(affordable, usable + 1))


def _num_host_blocks(config: EngineConfig, block_bytes: int, num_blocks: int) -> int:
    """Blocks of the swap space, the null block aside."""
    space = config.cache.swap_space
    if space is None:
        return min(num_blocks - 1, 4 * _GIB // block_bytes)
    return int(space * _GIB) // block_bytes


def _default_memory(config: EngineConfig, device: str) -> int:
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(free - (1.0 - config.cache.gpu_memory_utilization) * total)
    return min(_GIB, _available_memory() // 4)


def _available_memory() -> int:
    """Bytes the machine could still give; where it does not say, assume 4 GiB."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        return kib * 1024
    except (OSError, StopIteration):
        return 4 * _GIB


def _weights_row(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> tuple[str, str, str]:
    if config.model.load_format == "dummy":
        return "weights", "random", "--load-format dummy"
    if spec.quantization is None:
        return "weights", str(dtype)[6:], "--dtype"
    reason = "dequantised when read: the checkpoint's accuracy, not its size"
    if spec.quantization.not_applied:
        reason += f"; not applied: {spec.quantization.not_applied}"
    return "weights", f"{str(dtype)[6:]}, from {spec.quantization.method}", reason


def _sampling_row(config: EngineConfig, defaults: GenerationDefaults) -> tuple[str, str, str]:
    if config.model.generation_config == "none":
        return "sampling defaults", "none", "--generation-config"
    reason = "generation_config.json; --generation-config"
    if defaults.left_out:
        reason = f"generation_config.json, but {_listed(defaults.left_out)} is out of range"
    return "sampling defaults", _listed(defaults.sampling) or "none", reason


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _context_reason(spec: ModelSpec) -> str:
    if spec.window is not None:
        return "at most the sliding window: more is not built; --max-model-len"
    if spec.rope.kind == "dynamic":
        return (
            f"--max-model-len; prompts beyond {spec.rope.original} share no blocks (dynamic RoPE)"
        )
    return "--max-model-len"


def _summary(
    config: EngineConfig,
    policy: Policy,
    spec: ModelSpec,
    layout: KVLayout,
    num_blocks: int,
    max_len: int,
    dtype: torch.dtype,
    device: str,
) -> list[tuple[str, str, str]]:
    """Rows (feature, state, why) of the start-up table."""
    block_bytes = layout.block_elements * dtype.itemsize
    pool = (num_blocks - 1) * block_bytes
    full = (num_blocks - 1) / layout.blocks_for(max_len)
    chunked = config.scheduler.enable_chunked_prefill
    caching = config.cache.enable_prefix_caching
    return [
        ("model", config.model.model, f"{spec.architecture}, {str(dtype)[6:]} on {device}"),
        _weights_row(config, spec, dtype),
        ("context", f"{max_len} tokens", _context_reason(spec)),
        (
            "policy",
            str(policy),
            spec.policy_refusal
            or policy.caution
            or "--policy; a request's kv_policy may override it",
        ),
        ("kv layout", layout.granularity.value, _LAYOUT_MEANS[layout.granularity]),
        (
            "kv pool",
            f"{num_blocks - 1} blocks of {layout.block_size} tokens, {pool / 2**20:.0f} MiB",
            f"{full:.1f} sequences of full length; --kv-cache-memory",
        ),
        ("chunked prefill", "on" if chunked else "off", "--enable-chunked-prefill"),
        ("prefix caching", "on" if caching else "off", "--enable-prefix-caching"),
        ("cuda graphs", "off", "not built yet" if device == "cuda" else "no GPU"),
    ]


def _linear_layers(dtype: torch.dtype, device: str) -> tuple[str, str]:
    if can_pack(dtype, device):
        return "oneDNN", "weights are packed for this CPU"
    return "torch", "oneDNN is for float32 and bfloat16 on a CPU"


def _scheduling_summary(config: EngineConfig, num_host_blocks: int) -> list[tuple[str, str, str]]:
    """Rows of the start-up table on who runs, who makes way, and when events run."""
    scheduler = config.scheduler
    observed = scheduler.max_num_observed_tokens or scheduler.max_num_batched_tokens
    swap = f"swap to {num_host_blocks} host blocks" if num_host_blocks else "recompute"
    return [
        ("scheduling", scheduler.scheduling_policy, "--scheduling-policy"),
        ("preemption", swap, "--swap-space; uncompressed ones, and what fits not, are recomputed"),
        ("events per step", f"{observed} queries", "--max-num-observed-tokens"),
        ("break-even gate", config.compression.gate, "--gate on leaves out events that cannot pay"),
    ]
