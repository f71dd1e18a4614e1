"""All settings of the engine, each defined once. The command line's flags are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, get_type_hints

from kvserve.log import ConfigError
from kvserve.setting_values import checked, did_you_mean

KV_CACHE_DTYPES = ("auto", "int8", "k8v4", "fp8")


def setting(default: Any, help: str, **extra: Any) -> Any:
    """A dataclass field with its help text.

    ``extra`` may hold ``choices``, ``synonyms`` (other names of choices) and ``aliases`` (flags).

    The flag is the field's name with dashes (``max_num_seqs`` -> ``--max-num-seqs``).
    """
    metadata = {"help": help, **extra}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint is loaded, and how."""

    model: str = setting(
        "kvserve/tiny",
        "model directory or hub id; kvserve/tiny is the one that ships",
        aliases=("--model-path",),
    )
    tokenizer: str | None = setting(None, "tokenizer directory or hub id (default: the model's)")
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    dtype: str = setting(
        "auto",
        "auto is the checkpoint's dtype on a GPU and float32 on a CPU; half is float16, float is "
        "float32",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"half": "float16", "float": "float32"},
    )
    max_model_len: int | None = setting(
        None,
        "longest sequence in tokens, prompt included (accepts 32k; default: the model's)",
        aliases=("--context-length",),
    )
    load_format: str = setting(
        "auto",
        "auto reads safetensors; dummy gives random weights from config.json alone",
        choices=("auto", "safetensors", "dummy"),
    )
    download_dir: str | None = setting(
        None, "where hub models are kept (default: the cache that HF_HOME names)"
    )
    hf_overrides: Mapping[str, Any] = setting({}, "fields to replace in config.json, as JSON")
    skip_tokenizer_init: bool = setting(
        False, "load no tokenizer: requests and answers are token ids"
    )
    trust_remote_code: bool = setting(False, "let the tokenizer run code from its repository")
    generation_config: str = setting(
        "auto",
        "where default sampling settings come from: the checkpoint's generation_config.json (auto) "
        "or nowhere (none)",
        choices=("auto", "none"),
    )
    quantization: str | None = setting(
        None,
        "how the weights are quantised; config.json decides, and a value given here must agree",
        choices=("compressed-tensors", "awq"),
        aliases=("-q",),
    )
    seed: int = setting(0, "seed of random weights, and of requests that have no seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = setting(
        None, "tokens per block (default: 64 on a GPU, else 16)", aliases=("--page-size",)
    )
    num_gpu_blocks_override: int | None = setting(
        None, "blocks in the pool, instead of sizing it from memory"
    )
    kv_cache_memory: int | None = setting(
        None,
        "bytes for the pool, of each rank (accepts 512MiB, 2GiB; CPU default: the smaller of 1 GiB "
        "and a quarter of free memory)",
        aliases=("--kv-cache-memory-bytes",),
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of the GPU's memory the engine may use", aliases=("--mem-fraction-static",)
    )
    enable_prefix_caching: bool = setting(
        True, "keep computed prompt blocks and reuse them for prompts that begin alike"
    )
    swap_space: float | None = setting(
        None,
        "GiB of host memory for preempted sequences whose cache was compressed, and for "
        "continuations that leave the pool (default: as much as the pool, at most 4; 0: their "
        "tokens are computed again)",
    )
    continuations: str = setting(
        "off",
        "keep a compressed sequence's cache when it ends, and resume from it if a later prompt "
        "begins with its tokens under the same policy",
        choices=("off", "on"),
    )
    continuation_memory: int | None = setting(
        None,
        "most bytes of the pool, of each rank, that continuations may hold (accepts 512MiB, "
        "2GiB; default: all that is free)",
    )
    kv_layout: str = setting(
        "auto",
        "where cache lengths may differ: nowhere (model), between layers (layer), or also between "
        "KV heads (head); auto is what --policy needs",
        choices=("auto", "model", "layer", "head"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "how keys and values are stored: as numbers of the model's dtype (auto), or quantised with "
        "a scale for each token and head: 8 bits (int8, or e4m3 as fp8), or 8 bits for keys and 4 "
        "for values (k8v4)",
        choices=KV_CACHE_DTYPES,
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much one step may run, and which requests run first."""

    max_num_seqs: int = setting(
        256, "most sequences running at once", aliases=("--max-running-requests",)
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step")
    enable_chunked_prefill: bool = setting(
        True, "split prompts that do not fit a step, and mix them with decodes"
    )
    async_scheduling: bool | None = setting(
        None,
        "prepare the next step while the current one runs; a sequence that ends by a stop token "
        "then computes one token too many (default: on for a GPU)",
    )
    scheduling_policy: str = setting(
        "fcfs",
        "which request runs first: the oldest (fcfs), or the one with the lowest priority number, "
        "then the oldest (priority)",
        choices=("fcfs", "priority"),
    )
    max_num_observed_tokens: int | None = setting(
        None,
        "most queries that the compactions of one step may score with; further compactions wait "
        "for the next step (default: --max-num-batched-tokens)",
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks that share one model (tensor parallel), and replicas of the engine (data parallel)."""

    tensor_parallel_size: int = setting(
        1,
        "processes that share one model, each with a GPU of its own, or with CPU cores where there "
        "is no GPU",
        aliases=("-tp", "--tp"),
    )
    data_parallel_size: int = setting(
        1,
        "replicas of the engine, on Ray Serve (extra ray)",
        aliases=("-dp",),
    )
    autoscaling_config: Mapping[str, Any] = setting(
        {},
        "Ray Serve's autoscaling settings as JSON, as in '{\"max_replicas\": 4}'; "
        "--data-parallel-size replicas start",
    )


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Which policy compresses the cache, and which policies requests may choose."""

    policy: str = setting("none", "KV cache policy; `kvserve policies` lists them")
    policy_args: Mapping[str, Any] = setting(
        {}, "fields of the policy as JSON, as in '{\"window\": 128}'; same as --policy.window 128"
    )
    allow_request_policy: str = setting(
        "all",
        "which policies a request may choose by kv_policy: all, those of --request-policies "
        "(listed), or none; the policy none is always allowed",
        choices=("all", "listed", "none"),
    )
    request_policies: tuple[str, ...] = setting(
        (), "names that --allow-request-policy listed allows"
    )
    task_classifier: str | None = setting(
        None,
        "directory of a sequence classifier that tells windowkv the task of a prompt; label 0 is "
        "localization (default: the small one that ships)",
    )
    gate: str = setting(
        "off",
        "on skips a periodic compaction that would cost more time than it saves, judged by the "
        "steps measured so far",
        choices=("off", "on"),
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of one engine. ``EngineConfig.from_flat(**settings)`` takes flat field names.

    Raises ``ConfigError``, which names the flag, if a value is out of range or if two settings
    contradict each other.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compression: CompressionConfig = field(default_factory=CompressionConfig)
    device: str = setting(
        "auto", "auto is a GPU where torch sees one", choices=("auto", "cuda", "cpu")
    )
    attention_backend: str = setting(
        "auto",
        "attention implementation: auto, cpu (compiled by g++ at first use), triton, flash-attn, "
        "xformers (prefill alone) or torch; two as in xformers,triton are for prefill and decode",
    )
    code_attention: str = setting(
        "auto",
        "how attention reads the entries that spindlekv holds as codes: as codes (direct), or "
        "rebuilt in scratch blocks layer by layer (rebuild); auto is direct where the attention "
        "backend can",
        choices=("auto", "direct", "rebuild"),
    )
    grammar_backend: str = setting(
        "llguidance",
        "library that compiles JSON schemas and grammars for structured output",
        choices=("llguidance", "xgrammar"),
    )
    enforce_eager: bool = setting(False, "never capture CUDA graphs (a CPU has none)")
    cudagraph_capture_sizes: tuple[int, ...] = setting(
        (),
        "batch sizes to capture a CUDA graph of decoding for; a batch is padded to the next size "
        "(accepts 1k; default on a GPU: 1, 2, 4, 8, multiples of 16 up to 512; a CPU has no "
        "graphs, and runs the same padded steps for sizes given here)",
        aliases=("--cuda-graph-sizes",),
    )

    def __post_init__(self) -> None:
        _validate(self)

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Build from flat names (``max_num_seqs=8``), or from those of a flag's other names.

        Sizes may be text, as on the command line (``max_model_len="32k"``). ``ConfigError`` names
        what is unknown or has the wrong type.
        """
        sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        own: dict[str, Any] = {}
        for given, value in settings.items():
            name = _ALIASES.get(given, given)
            if name not in _SETTINGS:
                raise ConfigError(f"unknown setting {given!r}{did_you_mean(given, _SETTINGS)}")
            if name != given and name in settings:
                raise ConfigError(f"{name} is given twice, once as {given}")
            section, item, hint = _SETTINGS[name]
            target = own if section is None else sections[section]
            target[name] = checked(item, hint, value)
        built = {name: SECTIONS[name](**values) for name, values in sections.items()}
        return cls(**built, **own)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "compression": CompressionConfig,
}


def _settings() -> dict[str, tuple[str | None, Field[Any], Any]]:
    """By name: the section (``None``: the engine's own), the field and its type."""
    return {
        item.name: (section, item, hints[item.name])
        for section, kind in [*SECTIONS.items(), (None, EngineConfig)]
        for hints in [get_type_hints(kind)]
        for item in fields(kind)
        if "help" in item.metadata
    }


_SETTINGS = _settings()
_ALIASES = {
    alias.lstrip("-").replace("-", "_"): name
    for name, (_, item, _) in _SETTINGS.items()
    for alias in item.metadata.get("aliases", ())
}


def _validate(config: EngineConfig) -> None:
    model, cache, scheduler = config.model, config.cache, config.scheduler
    compression = config.compression
    checks = (
        (model.max_model_len is None or model.max_model_len >= 2, "--max-model-len must be >= 2"),
        (cache.block_size is None or cache.block_size >= 1, "--block-size must be >= 1"),
        (
            cache.num_gpu_blocks_override is None or cache.num_gpu_blocks_override >= 2,
            "--num-gpu-blocks-override must be >= 2",
        ),
        (
            cache.kv_cache_memory is None or cache.kv_cache_memory > 0,
            "--kv-cache-memory must be above 0",
        ),
        (
            cache.continuations in ("off", "on"),
            f"--continuations: {cache.continuations!r} is not off or on",
        ),
        (
            cache.continuation_memory is None
            or (cache.continuations == "on" and cache.continuation_memory > 0),
            "--continuation-memory must be above 0, and goes with --continuations on",
        ),
        (
            0.0 < cache.gpu_memory_utilization <= 1.0,
            "--gpu-memory-utilization must be in (0, 1]",
        ),
        (
            (compression.allow_request_policy == "listed") == bool(compression.request_policies),
            "--allow-request-policy listed and --request-policies go together",
        ),
        (
            cache.swap_space is None or cache.swap_space >= 0.0,
            "--swap-space must be >= 0 (GiB of host memory)",
        ),
        (
            scheduler.max_num_observed_tokens is None or scheduler.max_num_observed_tokens >= 1,
            "--max-num-observed-tokens must be >= 1",
        ),
        (scheduler.max_num_seqs >= 1, "--max-num-seqs must be >= 1"),
        (scheduler.max_num_batched_tokens >= 1, "--max-num-batched-tokens must be >= 1"),
        (
            cache.kv_cache_dtype in KV_CACHE_DTYPES,
            f"--kv-cache-dtype: {cache.kv_cache_dtype!r} is not one of "
            f"{', '.join(KV_CACHE_DTYPES)}",
        ),
        (
            all(size >= 1 for size in config.cudagraph_capture_sizes),
            "--cudagraph-capture-sizes must be >= 1",
        ),
        (
            not (config.enforce_eager and config.cudagraph_capture_sizes),
            "--enforce-eager captures no graphs; drop --cudagraph-capture-sizes",
        ),
        (config.parallel.tensor_parallel_size >= 1, "--tensor-parallel-size must be >= 1"),
        (config.parallel.data_parallel_size >= 1, "--data-parallel-size must be >= 1"),
        (
            config.parallel.data_parallel_size > 1 or not config.parallel.autoscaling_config,
            "--autoscaling-config needs --data-parallel-size 2 or more",
        ),
        (
            scheduler.max_num_batched_tokens >= scheduler.max_num_seqs,
            "--max-num-batched-tokens must be at least --max-num-seqs "
            "(every running sequence decodes one token a step)",
        ),
    )
    for ok, message in checks:
        if not ok:
            raise ConfigError(message)
