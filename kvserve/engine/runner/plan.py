"""What is decided before anything is loaded: of the settings, the model's config and the machine.

``make_plan`` allocates nothing. Every rank builds its runner of the same plan (``rank.py``).
Errors name the flag to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvserve.config import EngineConfig, ModelConfig, SchedulerConfig
from kvserve.engine.attention.select import Choice, Needs, select_backend
from kvserve.engine.cache.entry_store import block_bytes
from kvserve.engine.cache.log_form import LogForm, choose_log
from kvserve.engine.models.hub import QUERY_STATISTICS, find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.entry_format import TILE, EntryFormat, entry_format
from kvserve.late import Late, LateModule, Made
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.cache_group import GroupSpec, further_groups
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.triggers.trigger import EventKind

if TYPE_CHECKING:
    from kvserve.scheduler.speculation.speculation import NgramSettings

KEPT_SCORE_BYTES = 256 * 1024 * 1024
"""Memory for scores that the policies of requests keep from event to event."""
policy_fit = LateModule("engine.runner.policy_fit")
_statistics_for = Late("engine.compression.query_statistics:statistics_for")
_statistics_in = Late("engine.compression.query_statistics:statistics_in")
_read_speculation = Late("engine.runner.speculative_config:read_speculation")
_with_states = Late("engine.runner.state_plan:with_states")
window_plan = LateModule("engine.runner.window_plan")
_CPU_PREFILL = 512
_CPU_OBSERVED = 512  # a window of Kara's
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class EnginePlan:
    """What was decided; equal on all ranks.

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
    statistics: Made[Any] | None
    """``QueryStatistics`` of the model, if they were measured; read when a policy asks."""

    @property
    def most_kept_scores(self) -> int:
        """Most scores per layer and head that a policy may keep for each row."""
        return self.kept_score_bytes // self._score_bytes

    @property
    def kept_score_bytes(self) -> int:
        """Memory outside the pool for scores that policies keep, requests' policies included."""
        may_choose = self.config.compression.allow_request_policy != "none"
        return max(
            self._score_bytes * self.policy.demands.kept_scores, KEPT_SCORE_BYTES * may_choose
        )

    @property
    def _score_bytes(self) -> int:
        rows = self.config.scheduler.max_num_seqs
        return 4 * rows * self.layout.num_layers * self.layout.num_kv_heads

    @property
    def form(self) -> EntryFormat:
        """What an entry is stored as."""
        return entry_format(self.config.cache.kv_cache_dtype, self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        """Bytes of one of a rank's blocks."""
        return block_bytes(self.layout, self.form)

    def blocks_for(self, num_tokens: int, *, logged: bool = False) -> int:
        """Most blocks of a sequence of ``num_tokens``; if ``logged``, also those of all queries."""
        further = sum(group.blocks_for(self.layout, num_tokens) for group in self.groups)
        if logged:
            further += -(-num_tokens // self.log_block_tokens) * self.layout.groups
        return self.layout.blocks_for(num_tokens) + further

    @property
    def log_block_tokens(self) -> int:
        """Tokens whose queries one block holds."""
        return self.log.block_tokens(self.layout, self.form, self.dtype.itemsize)

    @property
    def max_prefill_tokens(self) -> int:
        """The most tokens of prompts in a step that also generates."""
        scheduler = self.config.scheduler
        most = scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill:
            return most
        # On a CPU a step's time is in proportion to its tokens, and small chunks cost nothing.
        usual = min(most, _CPU_PREFILL) if self.device == "cpu" else most
        return scheduler.max_prefill_tokens or usual

    @property
    def max_observed_tokens(self) -> int:
        """The most queries whose attention the events of one step work out."""
        scheduler = self.config.scheduler
        # A CPU wins nothing by several windows at once: one after the other holds up fewer steps.
        most = scheduler.max_num_batched_tokens
        usual = min(most, _CPU_OBSERVED) if self.device == "cpu" else most
        return scheduler.max_num_observed_tokens or usual

    @property
    def speculation(self) -> NgramSettings | None:
        """How next tokens are guessed, if they are."""
        wanted = self.config.scheduler.speculative_config
        return _read_speculation(wanted, self.device) if wanted else None

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched before the one in front of it is collected."""
        wanted = self.config.scheduler.async_scheduling
        return self.device == "cuda" if wanted is None else wanted

    def graph_sizes(self, choice: Choice) -> tuple[list[int], str]:
        """The numbers of rows to capture a CUDA graph of decoding for, ascending (none: no graphs),
        and why. ``ConfigError`` if sizes are named that cannot be captured.

        Layers of transformers' own rule graphs out: they may ask the device for numbers.
        """
        wanted, most = self.config.cudagraph_capture_sizes, self.config.scheduler.max_num_seqs
        if self.config.enforce_eager:
            return [], "--enforce-eager"
        if self.device != "cuda" and not wanted:
            return [], "no GPU"
        refused = None
        if self.spec.borrowed:
            refused = (
                "transformers' modules may wait for the device; --model-impl native, if there is"
            )
        elif not choice.backend.replays:
            refused = f"decode attention {choice.name} plans each step anew; --attention-backend"
        if refused is not None:
            if wanted:
                raise ConfigError(f"--cudagraph-capture-sizes: {refused}")
            return [], refused
        from kvserve.engine.runner.cuda_graph import LARGEST

        usual = {1, 2, 4, 8, *range(16, LARGEST + 1, 16), min(most, LARGEST)}
        sizes = sorted(size for size in wanted or usual if size <= most)
        if not sizes:
            raise ConfigError(f"--cudagraph-capture-sizes: all are above --max-num-seqs {most}")
        how = "captured" if self.device == "cuda" else "no GPU: the same padded steps, called"
        return sizes, f"{how}; --cudagraph-capture-sizes"

    def attention(self, name: str) -> Choice:
        """The backend that ``name`` (``--attention-backend``) means here."""
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
            remainders=self.policy.demands.leaves != "off",
            codes=self.policy.demands.event_kind is EventKind.CODED,
            rest=self.policy.demands.rest_bits > 0,
            windowed=self.spec.windowed,
            sinks=self.spec.sinks,
            soft_cap=self.spec.soft_cap,
            window_dim=self.spec.window_heads and self.spec.window_heads[1],
        )
        return select_backend(name, needs)


def make_plan(config: EngineConfig) -> EnginePlan:
    """Look up the policy and the model, and decide what every rank builds of them."""
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size (--data-parallel-size): this is one engine, and kvserve serve runs "
            "several; in Python start a process for each"
        )
    device, ranks = device_of(config.device), config.parallel.tensor_parallel_size
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"--tensor-parallel-size: {ranks} ranks need a GPU each, and there are "
            f"{torch.cuda.device_count()}"
        )
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
    spec = choose_spec(directory, config.model, device)
    layers, part = spec.layers, spec.part(ranks)
    num_layers = len(layers.full) or spec.num_layers
    dtype = _dtype_of(config.model, spec, device)
    form = _entry_form_of(config.cache.kv_cache_dtype, spec, dtype, device)
    size = config.cache.block_size
    if form.few and size is not None and size % TILE:
        raise ConfigError(f"--block-size: {size} is no multiple of {TILE}, as {form.name} needs")
    log, block_size = choose_log(
        *((policy.query_reduction, policy.logged_dtype), part, form),
        *(dtype, device, config.cache.block_size),
        has_fp8=device == "cuda" and _has_fp8(),
        backend=config.attention_backend,
    )
    with _naming_flags():
        policy = policy.for_model(num_layers, block_size)
    max_len = _max_len_of(config.model.max_model_len, config.scheduler, spec.max_position)
    beside: Path = (directory if directory.is_dir() else directory.parent) / QUERY_STATISTICS
    statistics = Made(partial(_statistics_in, beside, spec)) if beside.is_file() else None
    granularity, kv_layout = Granularity.MODEL, config.cache.kv_layout
    if policy.name != "none":
        continues = config.cache.continuations == "on"
        policy_fit.check_policy(policy, spec, form, max_len, continues=continues)
        if policy.demands.uses_centres:
            statistics = _statistics_for(policy, spec, directory, beside)
            policy = policy.with_statistics(None)  # read once, for requests too
    if policy.name != "none" or kv_layout != "auto":
        granularity = policy_fit.choose_granularity(policy, kv_layout, ranks)
    shape = num_layers, part.num_kv_heads, spec.head_dim, block_size, granularity
    layout = KVLayout(*shape, holds_entries=bool(layers.full))
    if spec.window_heads is not None:
        layout = window_plan.with_windows(layout, form, spec)
    groups = further_groups(layout, block_bytes(layout, form))
    chunk = config.scheduler.max_num_batched_tokens
    if layers.windowed:
        from kvserve.scheduler.blocks.window_group import WindowSpec

        assert spec.window is not None
        groups += (WindowSpec(block_size, len(layers.windowed), spec.window, chunk),)
    if form.newest:
        groups += window_plan.exact_specs(spec, form, layout, dtype.itemsize, chunk, policy)
    if policy.demands.rest_bits:
        from kvserve.engine.cache.rest_rows import rest_spec

        if ranks > 1:
            raise ConfigError(
                "--tensor-parallel-size: bits by KV head (--policy.rest_bits) are shared out by "
                "one rank; use 1"
            )
        groups += (rest_spec(layout, block_bytes(layout, form), policy.demands.rest_bits, form),)
    if policy.demands.event_kind is EventKind.CODED:
        from kvserve.engine.cache.code_rows import check_codes
        from kvserve.scheduler.blocks.code_group import CodeSpec

        if form.quantized:
            raise ConfigError(
                f"--kv-cache-dtype {form.name}: {policy.name} codes vectors as they were computed; "
                "use auto, or --policy.codebook false"
            )
        groups += (CodeSpec(check_codes(spec, max_len, block_bytes(layout, form))),)
    if spec.states:
        sizes = layout, block_bytes(layout, form), max_len
        config, of_states = _with_states(config, spec, dtype, device, *sizes)
        groups += (of_states,)
    shared = config, directory, spec, dtype, device, layout, log, groups
    return EnginePlan(*shared, max_len, policy, statistics)


@contextmanager
def _naming_flags() -> Iterator[None]:
    """Turn a policy's errors into ``ConfigError`` that names the command line's flag."""
    try:
        yield
    except PolicyError as error:
        raise ConfigError(f"{error.flag}: {error}") from None


def device_of(wanted: str) -> str:
    """``cuda`` or ``cpu``, as ``--device`` says."""
    has_cuda = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("--device cuda: torch sees no CUDA device; --device cpu runs on the CPU")
    return wanted


def _dtype_of(model: ModelConfig, spec: ModelSpec, device: str) -> torch.dtype:
    """What is computed in; ``ConfigError`` also if the weights are not quantised as asked."""
    found = None if spec.quantization is None else spec.quantization.method
    if model.quantization not in (None, found):
        raise ConfigError(
            f"--quantization: {model.quantization} is asked for, but config.json says "
            f"{found or 'nothing of it'}; kvserve reads quantised weights and makes none"
        )
    name = model.dtype
    if name == "auto":
        name = "float32" if device == "cpu" else spec.dtype
    if name not in _DTYPES:
        raise ConfigError(f"--dtype: config.json asks for {name}; choose {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _max_len_of(wanted: int | None, scheduler: SchedulerConfig, longest: int) -> int:
    wanted = wanted or longest
    if wanted > longest:
        raise ConfigError(
            f"--max-model-len: {wanted} exceeds the model's longest context, {longest} tokens"
        )
    budget = scheduler.max_num_batched_tokens
    if not scheduler.enable_chunked_prefill and budget < wanted:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least {wanted} "
            f"(--max-model-len), got {budget}"
        )
    return wanted


def _entry_form_of(name: str, spec: ModelSpec, dtype: torch.dtype, device: str) -> EntryFormat:
    """The format of entries; ``ConfigError`` if the head size or the device does not support it."""
    form = entry_format(name, dtype.itemsize)
    if (reason := form.refusal(spec.head_dim)) is not None:
        raise ConfigError(f"--kv-cache-dtype {name}: {reason}; auto holds heads of any size")
    if name == "fp8" and device == "cuda" and not _has_fp8():
        raise ConfigError(
            "--kv-cache-dtype fp8: needs a GPU of compute capability 8.9 or newer; int8 takes as "
            "many bytes"
        )
    return form


def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)
