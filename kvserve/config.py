"""All settings of the engine, each defined once. The command line's flags are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvserve.entry_format import FORMATS
from kvserve.fields import Setting, check_limits, setting, settings_of
from kvserve.log import ConfigError, shown

KV_CACHE_DTYPES = ("auto", *FORMATS)
QUANTIZATIONS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint is loaded, and how."""

    model: str = setting(
        "kvserve/tiny",
        "model directory, GGUF file or hub id; kvserve/tiny ships, and smollm2 is what `kvserve "
        "fetch smollm2` has fetched",
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
        least=2,
    )
    load_format: str = setting(
        "auto",
        "auto reads a directory's safetensors, or a GGUF file; dummy gives random weights from the "
        "config alone",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    model_impl: str = setting(
        "auto",
        "whose layers run: kvserve's own (native), transformers' modules with kvserve's cache and "
        "attention, or the first of these that knows the model (auto)",
        choices=("auto", "native", "transformers"),
        synonyms={"vllm": "native"},
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
        choices=QUANTIZATIONS,
        aliases=("-q",),
    )
    seed: int = setting(0, "seed of random weights, and of requests that have no seed")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = setting(
        None,
        "tokens per block (default: 64 on a GPU, else 16; up to 64 if smaller blocks of entries in "
        "few bits would waste bytes; more if a token's logged queries do not fit)",
        aliases=("--page-size",),
        least=1,
    )
    num_gpu_blocks_override: int | None = setting(
        None, "blocks in the pool, instead of sizing it from memory", least=2
    )
    kv_cache_memory: int | None = setting(
        None,
        "bytes for the pool, of each rank (accepts 512MiB, 2GiB; CPU default: the smaller of 1 GiB "
        "and a quarter of free memory)",
        aliases=("--kv-cache-memory-bytes",),
        above=0,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU's memory the engine may use",
        aliases=("--mem-fraction-static",),
        above=0,
        most=1,
    )
    enable_prefix_caching: bool = setting(
        True,
        "keep computed prompt blocks, and of hybrids states (half as many as --max-num-seqs), for "
        "prompts that begin alike",
    )
    swap_space: float | None = setting(
        None,
        "GiB of host memory for preempted sequences whose cache was compressed, and for "
        "continuations that leave the pool (default: as much as the pool, at most 4; 0: their "
        "tokens are computed again)",
        least=0,
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
        "how keys and values are stored: as numbers of the model's dtype (auto), or in fewer bits: "
        "8 (int8, or e4m3 as fp8), 8 for keys and 4 for values (k8v4), or few of both: the same in "
        "all layers (k4v4, k3v3, k2v2), or on average, each layer as many as it needs (3bit)",
        choices=KV_CACHE_DTYPES,
        synonyms={"fp8_e4m3": "fp8"},
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much one step may run, and which requests run first."""

    max_num_seqs: int = setting(
        256, "most sequences running at once", aliases=("--max-running-requests",), least=1
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step", least=1)
    max_prefill_tokens: int | None = setting(
        None,
        "most tokens of prompts in a step that also generates: fewer keep running streams even, "
        "more shorten the wait for a first token (default: 512 on a CPU, else "
        "--max-num-batched-tokens)",
        least=1,
    )
    max_num_seqs_per_client: int | None = setting(
        None,
        "most sequences of one client running at once; a client is an API key or, without keys, "
        "an address (default: --max-num-seqs)",
        least=1,
    )
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
        "for the next step (default: 512 on a CPU, which wins nothing by more at once, else "
        "--max-num-batched-tokens)",
        least=1,
    )

    speculative_config: Mapping[str, Any] = setting(
        {},
        "guess next tokens and verify several in a step, as JSON with vLLM's keys, as in "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, '
        '"prompt_lookup_min": 2}\' (default: off)',
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks that share one model (tensor parallel), and replicas of the engine (data parallel)."""

    tensor_parallel_size: int = setting(
        1,
        "processes that share one model, each with a GPU of its own, or with CPU cores where there "
        "is no GPU",
        aliases=("-tp", "--tp"),
        least=1,
    )
    data_parallel_size: int = setting(
        1, "replicas of the engine, on Ray Serve (extra ray)", aliases=("-dp",), least=1
    )
    autoscaling_config: Mapping[str, Any] = setting(
        {},
        "Ray Serve's autoscaling settings as JSON, as in '{\"max_replicas\": 4}'; "
        "--data-parallel-size replicas start",
    )


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """Which policy compresses the cache, and which policies requests may choose."""

    policy: str = setting(
        "none",
        "KV cache policy; `kvserve policies` lists them; auto: the fastest setting within "
        "--policy.kl (0.05) that `kvserve bench frontier` has measured of the model",
    )
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
    policy_reason: str = ""
    """Why it is this policy, for the start-up table."""


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
    enforce_eager: bool = setting(False, "never capture CUDA graphs (a CPU has none)")
    cudagraph_capture_sizes: tuple[int, ...] = setting(
        (),
        "batch sizes to capture a CUDA graph of decoding for; a batch is padded to the next size "
        "(accepts 1k; default on a GPU: 1, 2, 4, 8, multiples of 16 up to 512; a CPU has no "
        "graphs, and runs the same padded steps for sizes given here)",
        aliases=("--cuda-graph-sizes",),
    )

    def __post_init__(self) -> None:
        for settings in (self, *(getattr(self, name) for name in SECTIONS)):
            check_limits(settings)
        cache, scheduler, compression = self.cache, self.scheduler, self.compression
        kept, sizes = cache.continuation_memory, self.cudagraph_capture_sizes
        listed = compression.allow_request_policy == "listed"
        for ok, message in (
            (
                kept is None or (cache.continuations == "on" and kept > 0),
                "--continuation-memory must be above 0, and goes with --continuations on",
            ),
            (
                scheduler.max_prefill_tokens is None or scheduler.enable_chunked_prefill,
                "--max-prefill-tokens needs --enable-chunked-prefill: it cuts prompts",
            ),
            (
                scheduler.max_num_batched_tokens >= scheduler.max_num_seqs,
                "--max-num-batched-tokens must be at least --max-num-seqs "
                "(every running sequence decodes one token a step)",
            ),
            (
                self.parallel.data_parallel_size > 1 or not self.parallel.autoscaling_config,
                "--autoscaling-config needs --data-parallel-size 2 or more",
            ),
            (
                listed == bool(compression.request_policies),
                "--allow-request-policy listed and --request-policies go together",
            ),
            (all(size >= 1 for size in sizes), "--cudagraph-capture-sizes must be >= 1"),
            (
                not (self.enforce_eager and sizes),
                "--enforce-eager captures no graphs; drop --cudagraph-capture-sizes",
            ),
        ):
            if not ok:
                raise ConfigError(message)

    @classmethod
    def from_flat(cls, **settings: Any) -> EngineConfig:
        """Build from flat names (``max_num_seqs=8``), or from those of a flag's other names.

        Sizes may be text, as on the command line (``max_model_len="32k"``). ``ConfigError`` names
        what is unknown or has the wrong type.
        """
        known = {*SETTINGS, *_ALIASES}
        if not settings.keys() <= known:
            from kvserve import absent

            settings = absent.take_known(
                settings, known, absent.SETTINGS, lambda text, _: ConfigError(text)
            )
        given: dict[str, Any] = {}
        for name, value in settings.items():
            known_as = _ALIASES.get(name, name)
            if name != known_as and known_as in settings:
                raise ConfigError(f"{known_as} is given twice, once as {name}")
            given[known_as] = SETTINGS[known_as].checked(value)

        built = {}
        for name, kind in SECTIONS.items():
            own = {item.name for item in settings_of(kind)} & given.keys()
            built[name] = kind(**{each: given.pop(each) for each in own})
        return cls(**built, **given)


def config_of(
    model: str, *, policy: str | Mapping[str, Any] = "none", **settings: Any
) -> EngineConfig:
    """The configuration that ``LLM`` and ``AsyncEngine`` make of the same arguments; vLLM's names
    for it are ``AsyncEngineArgs`` and ``EngineArgs``."""
    if not (isinstance(policy, str) or (isinstance(policy, Mapping) and "name" in policy)):
        wanted = 'a name, or a mapping with one like {"name": "kara", "window": 128}'
        raise ConfigError(f"policy must be {wanted}, got {shown(policy):.200}")
    spec = {"name": policy} if isinstance(policy, str) else dict(policy)
    name = spec.pop("name")
    return EngineConfig.from_flat(model=model, policy=name, policy_args=spec, **settings)


SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "compression": CompressionConfig,
}
SETTINGS: dict[str, Setting] = {
    item.name: item for kind in (*SECTIONS.values(), EngineConfig) for item in settings_of(kind)
}
"""All settings by name."""
_ALIASES = {
    alias.lstrip("-").replace("-", "_"): item.name
    for item in SETTINGS.values()
    for alias in item.aliases
}
