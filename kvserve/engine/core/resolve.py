"""Settings resolved against the model and the machine; errors name the flag to change."""

from __future__ import annotations

from pathlib import Path

import torch

from kvserve.config import EngineConfig
from kvserve.config_sections import SchedulerConfig
from kvserve.engine.cache.query_log import LogForm
from kvserve.engine.compression.query_statistics import FILE, load_statistics, refusal
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.entry_format import EntryFormat, entry_format
from kvserve.log import ConfigError, logger
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.pruning import Pruned

_CPU_PREFILL = 512
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def entry_form_of(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str
) -> EntryFormat:
    """The format of entries; ``ConfigError`` if the head size or the device does not support it."""
    name = config.cache.kv_cache_dtype
    form = entry_format(name, dtype.itemsize)
    if (refusal := form.refusal(spec.head_dim)) is not None:
        raise ConfigError(f"--kv-cache-dtype {name}: {refusal}; auto holds heads of any size")
    if name == "fp8" and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            "--kv-cache-dtype fp8: needs a GPU of compute capability 8.9 or newer; int8 takes as "
            "many bytes"
        )
    return form


def device_of(config: EngineConfig) -> str:
    has_cuda = torch.cuda.is_available()
    if config.device == "auto":
        return "cuda" if has_cuda else "cpu"
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device; --device cpu runs on the CPU")
    return config.device


def block_size_of(config: EngineConfig, device: str) -> int:
    """Entries of a block; on a GPU a multiple of attention's tiles, which then read one block."""
    return config.cache.block_size or (64 if device == "cuda" else 16)


def dtype_of(config: EngineConfig, spec: ModelSpec, device: str) -> torch.dtype:
    name = config.model.dtype
    if name == "auto":
        name = "float32" if device == "cpu" else spec.dtype
    if name not in _DTYPES:
        raise ConfigError(f"--dtype: config.json asks for {name}; choose {', '.join(_DTYPES)}")
    return _DTYPES[name]


def check_quantization(config: EngineConfig, spec: ModelSpec) -> None:
    found = None if spec.quantization is None else spec.quantization.method
    if config.model.quantization not in (None, found):
        raise ConfigError(
            f"--quantization: {config.model.quantization} is asked for, but config.json says "
            f"{found or 'nothing of it'}; kvserve reads quantised weights and makes none"
        )


def max_model_len_of(config: EngineConfig, spec: ModelSpec) -> int:
    longest = spec.max_position
    wanted = config.model.max_model_len or longest
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len: {wanted} exceeds the model's longest context, {longest} tokens"
        )
    budget = config.scheduler.max_num_batched_tokens
    if not config.scheduler.enable_chunked_prefill and budget < wanted:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {wanted} "
            f"(--max-model-len), got {budget}"
        )
    return wanted


def max_prefill_tokens_of(scheduler: SchedulerConfig, device: str) -> int:
    """The most tokens of prompts in a step that also generates."""
    most = scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill:
        return most
    # On a CPU a step's time is in proportion to its tokens, and small chunks cost nothing.
    return scheduler.max_prefill_tokens or (min(most, _CPU_PREFILL) if device == "cpu" else most)


def policy_refusal(policy: Policy, spec: ModelSpec) -> str | None:
    """Why the model may not be served under this policy, if so."""
    if policy.name == "none":
        return None
    prunes = isinstance(policy.event_trigger, Pruned)
    if spec.borrowed and prunes:
        return f"{policy.name} prunes between layers, and these are transformers' own"
    if spec.soft_cap and (policy.query_reduction or policy.recomputed_reduction):
        return f"the model caps its logits, and {policy.name} scores by logits that are not"
    if spec.windowed and spec.layers.full:
        if prunes:
            return f"{policy.name} drops tokens between layers, and some have sliding windows"
        if writes_codes(policy):
            return f"{policy.name} is not built for models with sliding windows"
        if policy.recomputed_reduction is not None:
            return "query_source recompute wants what sliding windows have given back; use log"
    return spec.policy_refusal


def check_policy(policy: Policy, spec: ModelSpec, max_len: int) -> None:
    if (refusal := policy_refusal(policy, spec)) is not None:
        raise ConfigError(f"--policy: {refusal}; use --policy none")
    window = policy.event_trigger.num_queries
    if window > max_len:
        raise ConfigError(f"--policy.window: {window} exceeds the context of {max_len} tokens")


def statistics_of(policy: Policy, spec: ModelSpec, directory: Path) -> Path | None:
    """The query statistics that the policy's ``stats`` name, or that lie beside the model; ``None``
    if there are none and the policy does without."""
    named = getattr(policy, "stats", None)
    folder = directory if directory.is_dir() else directory.parent
    path = folder / FILE if named is None else Path(named)
    if not policy.uses_centres and not path.is_file():
        return None
    if (reason := refusal(spec)) is not None:
        if policy.uses_centres:
            raise ConfigError(f"--policy {policy.name}: {reason}")
        return None
    if not path.is_file():
        raise ConfigError(
            f"--policy.stats: there is no {path}; {policy.name} scores by where the model's "
            f"queries point, which this measures: kvserve calibrate --model {directory} "
            "--output FILE"
        )
    try:
        load_statistics(path).check(spec, path)
    except ConfigError as error:
        if policy.uses_centres:
            raise ConfigError(f"--policy.stats: {error}") from None
        logger.warning("%s: requests cannot have triattention", error)
        return None
    return path


def choose_granularity(config: EngineConfig, policy: Policy) -> Granularity:
    """The layout that ``--kv-layout`` names, or (auto) the one that the policy needs.

    ``ConfigError`` if the policy or the number of ranks does not allow it.
    """
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


def log_form_of(
    config: EngineConfig, policy: Policy, part: ModelSpec, dtype: torch.dtype, device: str
) -> LogForm:
    """How this engine logs queries; the policies of requests share this form.

    If the server's policy logs none, the form is Kara's, unless an attention backend is named that
    cannot log it.
    """
    reduction, log_dtype = policy.query_reduction, _log_dtype(policy, dtype, device)
    if reduction is None:
        packages = {"flash-attn", "xformers"} & set(config.attention_backend.split(","))
        reduction, log_dtype = ("group_mean", log_dtype) if packages else ("heads", "int4")
    heads = part.num_heads if reduction == "heads" else part.num_kv_heads
    return LogForm(heads, log_dtype, reduction)


def _log_dtype(policy: Policy, dtype: torch.dtype, device: str) -> str:
    """How queries are logged: model, fp8 or int4."""
    has_it = device == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
    if policy.logged_dtype == "auto":
        return "fp8" if has_it and dtype is not torch.float32 else "model"
    if policy.logged_dtype == "fp8" and device == "cuda" and not has_it:
        raise ConfigError(
            "--policy.query_dtype: fp8 needs a GPU of compute capability 8.9 or newer; "
            "choose model or auto"
        )
    return policy.logged_dtype
