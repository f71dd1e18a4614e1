"""The sections of the settings: each setting's default, help text and limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvserve.entry_format import FORMATS
from kvserve.speculative_config import SpeculativeConfig

KV_CACHE_DTYPES = ("auto", *FORMATS)


Checks: TypeAlias = Sequence[tuple[bool, str]]
"""What must hold, each with the message if it does not."""


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
        choices=("compressed-tensors", "awq", "gptq"),
        aliases=("-q",),
    )
    seed: int = setting(0, "seed of random weights, and of requests that have no seed")

    def checks(self) -> Checks:
        length = self.max_model_len
        return ((length is None or length >= 2, "--max-model-len must be >= 2"),)


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
        "how keys and values are stored: as numbers of the model's dtype (auto), or in fewer bits: "
        "8 (int8, or e4m3 as fp8), 8 for keys and 4 for values (k8v4), 4 (k4v4), or 4 and 2 (k4v2)",
        choices=KV_CACHE_DTYPES,
    )

    def checks(self) -> Checks:
        pool, host, kept = self.kv_cache_memory, self.swap_space, self.continuation_memory
        blocks = self.num_gpu_blocks_override
        return (
            (self.block_size is None or self.block_size >= 1, "--block-size must be >= 1"),
            (blocks is None or blocks >= 2, "--num-gpu-blocks-override must be >= 2"),
            (pool is None or pool > 0, "--kv-cache-memory must be above 0"),
            (
                self.continuations in ("off", "on"),
                f"--continuations: {self.continuations!r} is not off or on",
            ),
            (
                kept is None or (self.continuations == "on" and kept > 0),
                "--continuation-memory must be above 0, and goes with --continuations on",
            ),
            (
                0.0 < self.gpu_memory_utilization <= 1.0,
                "--gpu-memory-utilization must be in (0, 1]",
            ),
            (host is None or host >= 0.0, "--swap-space must be >= 0 (GiB of host memory)"),
            (
                self.kv_cache_dtype in KV_CACHE_DTYPES,
                f"--kv-cache-dtype: {self.kv_cache_dtype!r} is not one of "
                f"{', '.join(KV_CACHE_DTYPES)}",
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How much one step may run, and which requests run first."""

    max_num_seqs: int = setting(
        256, "most sequences running at once", aliases=("--max-running-requests",)
    )
    max_num_batched_tokens: int = setting(2048, "most tokens in one step")
    max_prefill_tokens: int | None = setting(
        None,
        "most tokens of prompts in a step that also generates: fewer keep running streams even, "
        "more shorten the wait for a first token (default: 512 on a CPU, else "
        "--max-num-batched-tokens)",
    )
    max_num_seqs_per_client: int | None = setting(
        None,
        "most sequences of one client running at once; a client is an API key or, without keys, "
        "an address (default: --max-num-seqs)",
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
        "for the next step (default: --max-num-batched-tokens)",
    )

    speculative_config: Mapping[str, Any] = setting(
        {},
        "guess next tokens and verify several in a step, as JSON with vLLM's keys, as in "
        '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, '
        '"prompt_lookup_min": 2}\' (default: off)',
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """``speculative_config``, read."""
        return SpeculativeConfig.of(self.speculative_config)

    def checks(self) -> Checks:
        observed = self.max_num_observed_tokens
        prefill, of_one = self.max_prefill_tokens, self.max_num_seqs_per_client
        return (
            (prefill is None or prefill >= 1, "--max-prefill-tokens must be >= 1"),
            (
                prefill is None or self.enable_chunked_prefill,
                "--max-prefill-tokens needs --enable-chunked-prefill: it cuts prompts",
            ),
            (of_one is None or of_one >= 1, "--max-num-seqs-per-client must be >= 1"),
            (observed is None or observed >= 1, "--max-num-observed-tokens must be >= 1"),
            (self.max_num_seqs >= 1, "--max-num-seqs must be >= 1"),
            (self.max_num_batched_tokens >= 1, "--max-num-batched-tokens must be >= 1"),
            (
                self.max_num_batched_tokens >= self.max_num_seqs,
                "--max-num-batched-tokens must be at least --max-num-seqs "
                "(every running sequence decodes one token a step)",
            ),
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

    def checks(self) -> Checks:
        return (
            (self.tensor_parallel_size >= 1, "--tensor-parallel-size must be >= 1"),
            (self.data_parallel_size >= 1, "--data-parallel-size must be >= 1"),
            (
                self.data_parallel_size > 1 or not self.autoscaling_config,
                "--autoscaling-config needs --data-parallel-size 2 or more",
            ),
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
        "directory or hub id of a sequence classifier that tells windowkv with task auto the task "
        "of a prompt; label 0 is localization",
    )

    def checks(self) -> Checks:
        listed = self.allow_request_policy == "listed"
        return (
            (
                listed == bool(self.request_policies),
                "--allow-request-policy listed and --request-policies go together",
            ),
        )
