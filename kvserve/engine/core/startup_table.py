"""The rows of the start-up table: what was decided, and the flag or the fact behind it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from kvserve.config import EngineConfig
from kvserve.config_sections import SchedulerConfig
from kvserve.engine.cache.query_log import LogForm
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.query_statistics import load_statistics
from kvserve.engine.core.continuing import continuation_refusal
from kvserve.engine.core.resolve import max_prefill_tokens_of
from kvserve.engine.models.generation import GenerationDefaults
from kvserve.engine.models.linear import Holding, select_product
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.parts.arguments import MOST_TOKENS
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.memory import Profile
from kvserve.engine.runner.rank_plan import RankPlan
from kvserve.engine.runner.recorded_steps import RecordedSteps
from kvserve.entry_format import entry_format
from kvserve.kernels.cpu.build import why_missing
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.speculation.ngram_index import NgramSettings
from kvserve.scheduler.triggers.held import most_held

Row = tuple[str, str, str]
"""Feature, state, why."""
_LAYOUT_MEANS = {
    Granularity.MODEL: "all layers and heads hold equally many entries",
    Granularity.LAYER: "layers may hold different numbers of entries",
    Granularity.HEAD: "layers and KV heads may hold different numbers of entries",
}


def statistics_rows(policy: Policy, file: Path | None) -> list[Row]:
    """Where queries point, if the policy asks."""
    if file is None or not policy.uses_centres:
        return []
    statistics = load_statistics(file)
    middle = float(statistics.concentration.median())
    tokens = f"over {statistics.tokens:,} tokens" if statistics.tokens else "as released"
    means = "1: all of a head's queries point one way; kvserve calibrate"
    return [("query statistics", f"{tokens}, concentration {middle:.2f}", means)]


def plan_rows(
    policy: Policy, plan: RankPlan, num_blocks: int, max_len: int, *, holding: Holding
) -> list[Row]:
    """The model, the cache, and how ranks share them; ``holding``: which weights are levels."""
    config, spec, layout = plan.config, plan.spec, plan.layout
    dtype, device = plan.dtype, plan.device
    pool = num_blocks * plan.block_bytes
    full = num_blocks / plan.blocks_for(max_len)
    most = most_held(policy.event_trigger, max_len // 2, max_len, layout.block_size)
    evicted = layout.blocks_for(max_len) - layout.blocks_for(most)
    bounded = num_blocks / (plan.blocks_for(max_len) - evicted)
    each = " a rank" if config.parallel.tensor_parallel_size > 1 else ""
    caching = config.cache.enable_prefix_caching
    return [
        ("model", config.model.model, f"{spec.architecture}, {str(dtype)[6:]} on {device}"),
        _layers_row(spec),
        _weights_row(config, spec, dtype, device, holding),
        ("context", f"{max_len} tokens", _context_reason(spec)),
        (
            "policy",
            policy_state(policy),
            spec.policy_refusal
            or policy.caution
            or "--policy; a request's kv_policy may override it",
        ),
        ("kv layout", layout.granularity.value, _LAYOUT_MEANS[layout.granularity]),
        *_windows_rows(spec),
        _entries_row(plan),
        (
            "kv pool",
            f"{num_blocks} blocks of {layout.block_size} tokens, {pool / 2**20:.0f} MiB{each}",
            f"{full:.1f} sequences of full length, {bounded:.1f} as {policy.name} holds them (half "
            "prompt, half answer; without logged queries); --kv-cache-memory",
        ),
        _prefill_row(config.scheduler, device),
        ("prefix caching", "on" if caching else "off", "--enable-prefix-caching"),
        _continuations_row(plan, policy),
        *_ranks_rows(plan),
    ]


def _prefill_row(scheduler: SchedulerConfig, device: str) -> Row:
    if not scheduler.enable_chunked_prefill:
        return "chunked prefill", "off", "--enable-chunked-prefill"
    most = max_prefill_tokens_of(scheduler, device)
    return (
        "chunked prefill",
        f"at most {most} tokens beside decodes",
        "--max-prefill-tokens; --no-enable-chunked-prefill",
    )


def _continuations_row(plan: RankPlan, policy: Policy) -> tuple[str, str, str]:
    if plan.config.cache.continuations == "off":
        return "continuations", "off", "--continuations"
    refusal = continuation_refusal(policy, plan.spec)
    why = "policy none goes by the prefix cache" if policy.name == "none" else refusal
    return "continuations", "on", why or "--continuations"


def _entries_row(plan: RankPlan) -> Row:
    """What a token's entry is stored as, and how many bytes it takes."""
    dim, lanes = plan.spec.head_dim, plan.spec.num_layers * plan.layout.num_kv_heads
    computed = lanes * entry_format("auto", plan.dtype.itemsize).entry_bytes(dim)
    size = lanes * plan.form.entry_bytes(dim)
    name = plan.form.name if plan.form.quantized else f"auto ({str(plan.dtype)[6:]})"
    share = f", {size / computed:.2f} of {str(plan.dtype)[6:]}'s" if plan.form.quantized else ""
    beside = f"; the newest {plan.form.newest} at most also as computed" if plan.form.newest else ""
    return "kv cache dtype", name, f"{size} bytes a token{share}{beside}; --kv-cache-dtype"


def log_row(log: LogForm, device: str) -> Row:
    """How queries are logged, and which policies requests cannot choose because of it."""
    numbers = {"model": "in the model's dtype", "fp8": "as e4m3", "int4": "in 4 bits"}[log.dtype]
    state = {"heads": "all heads", "group_mean": "group means"}[log.reduction] + f" {numbers}"
    others = [name for name in policy_names() if not _fits(_default(name), log)]
    why = "--policy.query_reduce, --policy.query_dtype"
    if others:
        why += f"; requests for {', '.join(others)} are refused unless they log in this form"
    compiled = device == "cpu" and log.dtype == "int4"
    if compiled and (missing := why_missing("window_scores")) is not None:
        why += f"; torch scores with them: {missing}"
    return "query log", state, why


def _fits(policy: Policy | None, log: LogForm) -> bool:
    """Whether ``log`` is the form a policy needs; a policy that logs no queries always fits."""
    if policy is None or policy.query_reduction is None:
        return True
    return policy.query_reduction == log.reduction and policy.logged_dtype in ("auto", log.dtype)


def _default(name: str) -> Policy | None:
    """A policy with its required argument only; ``None`` if that is not enough."""
    needed = policy_class(name).needs[:1]
    try:
        return make_policy({"name": name, **dict.fromkeys(needed, MOST_TOKENS)})
    except PolicyError:  # a plug-in that needs more arguments
        return None


def memory_row(profile: Profile) -> Row:
    """What a rank's memory holds besides the pool."""
    weights, step, events = (
        f"{size / 2**20:.0f} MiB" for size in (profile.weights, profile.step, profile.events)
    )
    if not profile.step:
        return "memory", f"weights {weights}", "a step is measured only to size a GPU's pool"
    state = f"weights {weights}, a step {step}, events and swaps {events}"
    return "memory", state, "measured before the pool; --gpu-memory-utilization"


def remainders_row(remainders: Remainders | None, policy: Policy) -> Row:
    """What stands for dropped entries, and the memory beside the pool that is kept for it."""
    if remainders is None:
        return "remainders", "off", "attention does not read them; --attention-backend"
    state = f"{policy.leaves}, {remainders.nbytes / 2**20:.1f} MiB beside the pool"
    return "remainders", state, "what stands for dropped entries; --policy.remainder"


def graphs_row(sizes: list[int], reason: str, graphs: DecodeGraphs | RecordedSteps | None) -> Row:
    """Which decoding steps are captured, or recorded."""
    if isinstance(graphs, RecordedSteps):
        if graphs.refused is not None:
            return "recorded steps", "off", f"torch computes {graphs.refused} in a layer"
        how = "compiled kernels are called without Python between; --enforce-eager"
        return "recorded steps", "decodes, each size once", how
    if not sizes:
        return "cuda graphs", "off", reason
    chunks = 0 if graphs is None else len(graphs.chunk_sizes)
    beside = f"; with guesses {chunks}" if chunks else ""
    return "cuda graphs", f"decodes of up to {sizes[-1]}, {len(sizes)} sizes{beside}", reason


def linear_layers_row(spec: ModelSpec, dtype: torch.dtype, device: str) -> Row:
    """Which matrix product the linear layers use."""
    if spec.borrowed:
        return "linear layers", "torch", "transformers' modules keep their own matrices"
    return "linear layers", *select_product(dtype, device)


def scheduling_rows(plan: RankPlan, num_host_blocks: int) -> list[Row]:
    """Which requests run, what preemption does, and when events run."""
    config, overlaps = plan.config, plan.overlaps
    scheduler = config.scheduler
    observed = scheduler.max_num_observed_tokens or scheduler.max_num_batched_tokens
    speculation = plan.speculation
    swap = f"swap to {num_host_blocks} host blocks" if num_host_blocks else "recompute"
    overlapping = "--async-scheduling; by default on where there is a GPU"
    if speculation is not None:
        overlapping += ". Steps with guesses follow known tokens"
    return [
        (
            "scheduling",
            f"{scheduler.scheduling_policy}, clients take turns",
            "--scheduling-policy; a client (an API key or else an address) has at most "
            f"{scheduler.max_num_seqs_per_client or scheduler.max_num_seqs} sequences running: "
            "--max-num-seqs-per-client",
        ),
        ("overlapped steps", "on" if overlaps else "off", overlapping),
        speculation_row(speculation),
        (
            "preemption",
            swap,
            "--swap-space; what was never compressed, or does not fit, is recomputed",
        ),
        ("events per step", f"{observed} queries", "--max-num-observed-tokens"),
    ]


def speculation_row(speculation: NgramSettings | None) -> Row:
    """How next tokens are guessed."""
    if speculation is None:
        return "speculation", "off", "--speculative-config"
    state = f"ngram, up to {speculation.num_tokens} tokens"
    lookup = f"{speculation.shortest} to {speculation.longest}"
    why = f"looks up the newest {lookup}; none of a row whose newest were seldom right, or where"
    return "speculation", state, f"{why} more than {speculation.most_rows} rows decode"


def sampling_row(config: EngineConfig, defaults: GenerationDefaults) -> Row:
    """The sampling defaults of requests that name none."""
    if config.model.generation_config == "none":
        return "sampling defaults", "none", "--generation-config"
    reason = "generation_config.json; --generation-config"
    if defaults.left_out:
        reason = f"generation_config.json, but {_listed(defaults.left_out)} is out of range"
    return "sampling defaults", _listed(defaults.sampling) or "none", reason


def policy_state(policy: Policy) -> str:
    """A policy's name and its fields that are not defaults: ``kara, window 128, buffer 16``."""
    given = [
        f"{item.name} {getattr(policy, item.name)}"
        for item in fields(policy)  # type: ignore[arg-type]
        if getattr(policy, item.name) != item.default
    ]
    return ", ".join([policy.name, *given])


def _layers_row(spec: ModelSpec) -> Row:
    if spec.borrowed:
        return "layers", "transformers", "its modules on kvserve's cache; slower than native ones"
    return "layers", "native", "kvserve's own; --model-impl transformers runs transformers'"


def _weights_row(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: str, holding: Holding
) -> Row:
    quantized, forms = spec.quantization, {hold.form for hold in holding.matrices.values()}
    held = " and ".join(sorted({form.name for form in forms}))
    state = f"{held}, else {str(dtype)[6:]}" if held else str(dtype)[6:]
    if config.model.load_format == "dummy":
        return "weights", f"random, {state}", "--load-format dummy"
    source = spec.stored_as or (quantized and quantized.method)
    if not source:
        return "weights", state, "--dtype"
    reasons = ["as stored"] if forms else []
    rounded = any(form.rounds for form in forms)
    if device == "cuda" and not all(form.e4m3 and form.rounds for form in forms):
        reasons.append("steps of 64 tokens and more take longer than with numbers")
    if rounded:
        reasons.append("x is rounded to 8 bits too, at a scale per token")
    for why, count in holding.widened.items():
        reasons.append(f"{count} matrices are widened: {why}")
    if not reasons:
        reasons.append("widened when read: its accuracy, not its size")
    left_out = []
    if quantized is not None:
        left_out += ["the quantisation of activations"] * (quantized.activations and not rounded)
        left_out += ["the quantised KV cache"] * quantized.kv_cache
    if left_out:
        reasons.append(f"not applied: {' and '.join(left_out)}")
    return "weights", f"{state}, from {source}", "; ".join(reasons)


def _context_reason(spec: ModelSpec) -> str:
    if spec.rope.kind == "dynamic":
        return (
            f"--max-model-len; prompts beyond {spec.rope.original} share no blocks (dynamic RoPE)"
        )
    return "--max-model-len"


def _windows_rows(spec: ModelSpec) -> list[Row]:
    if not spec.windowed:
        return []
    state = f"{spec.window} tokens in {len(spec.windowed)} of {spec.num_layers} layers"
    reason = "blocks behind it are given back; policies act in the other layers"
    return [("sliding window", state, reason if spec.layers.full else reason.split(";")[0])]


def _ranks_rows(plan: RankPlan) -> list[Row]:
    ranks = plan.config.parallel.tensor_parallel_size
    if ranks == 1:
        return []
    part, library = plan.spec.part(ranks), "nccl" if plan.device == "cuda" else "gloo"
    state = f"{ranks} ranks, {part.num_heads} query and {part.num_kv_heads} KV heads each"
    return [("tensor parallel", state, f"{library}; --tensor-parallel-size")]


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())
