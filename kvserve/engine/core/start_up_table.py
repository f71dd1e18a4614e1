"""The start-up table: what was decided, why, and which flag changes it."""

from __future__ import annotations

import math
from dataclasses import fields
from statistics import mean

from kvserve.engine.attention.select import Choice
from kvserve.engine.cache.entry_table import EntryTable
from kvserve.engine.cache.log_form import LogForm
from kvserve.engine.messages import Row
from kvserve.engine.models.generation import GenerationDefaults
from kvserve.engine.models.implementation import linear_layers_row, model_rows
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.parts.arguments import MOST_TOKENS
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.runner.memory import Profile
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.engine.runner.plan import EnginePlan
from kvserve.engine.runner.policy_fit import continuation_refusal
from kvserve.engine.runner.rank import Pool
from kvserve.entry_format import TILE, entry_format
from kvserve.kernels.build import why_missing
from kvserve.late import LateModule
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.most_held import most_held
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.scheduler.triggers.trigger import Trigger

window_plan = LateModule("engine.runner.window_plan")

USUAL_LOG = "heads", "int4"
"""The form of a log that every policy of ours can use."""
_LAYOUT_MEANS = {
    Granularity.MODEL: "all layers and heads hold equally many entries",
    Granularity.LAYER: "layers may hold different numbers of entries",
    Granularity.HEAD: "layers and KV heads may hold different numbers of entries",
}


def start_up_table(
    plan: EnginePlan,
    pool: Pool,
    runner: ModelRunner,
    profile: Profile,
    attention: Choice,
    defaults: GenerationDefaults,
    threads: list[Row],
) -> list[Row]:
    """All rows: each part says its own."""
    config, spec, model = plan.config, plan.spec, runner.model
    remainders, operators = runner.batch.remainders, model.operators
    left = "off", "attention does not read them; --attention-backend"
    if remainders is not None:
        state = f"{plan.policy.demands.leaves}, {remainders.nbytes / 2**20:.1f} MiB beside the pool"
        left = state, "what stands for dropped entries; --policy.remainder"
    _, reason = plan.graph_sizes(attention)
    graphs = runner.graphs
    return [
        *model_rows(config.model, spec, plan.dtype, plan.device, model.holding),
        *_cache_rows(plan, pool.num_blocks - 1),
        *_table_rows(plan, model.entry_table),
        profile.row,
        ("remainders", *left),
        ("attention", attention.name, f"{attention.reason}; --attention-backend"),
        ("cuda graphs", "off", reason) if graphs is None else graphs.row(reason),
        linear_layers_row(spec, plan.dtype, plan.device),
        ("operators", operators.name, operators.reason),
        *threads,
        *_scheduling_rows(plan, pool.num_host_blocks),
        defaults.row(config.model.generation_config),
    ]


def _cache_rows(plan: EnginePlan, num_blocks: int) -> list[Row]:
    """The cache: its policy, its form, its size."""
    config, spec, layout, policy = plan.config, plan.spec, plan.layout, plan.policy
    dtype, ranks = str(plan.dtype)[6:], config.parallel.tensor_parallel_size
    dynamic = f"; prompts beyond {spec.rope.original} share no blocks (dynamic RoPE)"
    said = spec.policy_refusal or policy.caution, config.compression.policy_reason
    own = "; ".join(filter(None, said)) or "--policy; a request's kv_policy may override it"
    given = [
        f"{item.name} {getattr(policy, item.name)}"
        for item in fields(policy)  # type: ignore[arg-type]
        if getattr(policy, item.name) != item.default
    ]
    rows = [
        (
            "context",
            f"{plan.max_len} tokens",
            "--max-model-len" + dynamic * (spec.rope.kind == "dynamic"),
        ),
        ("policy", ", ".join([policy.name, *given]), own),
        ("kv layout", layout.granularity.value, _LAYOUT_MEANS[layout.granularity]),
    ]
    if spec.windowed:
        state = f"{spec.window} tokens in {len(spec.windowed)} of {spec.num_layers} layers"
        others = "; policies act in the other layers" if spec.layers.full else ""
        rows.append(("sliding window", state, f"blocks behind it are given back{others}"))
    if spec.window_heads or spec.sharing:
        rows += window_plan.shape_rows(plan)
    lanes = spec.num_layers * layout.num_kv_heads
    size = lanes * plan.form.mean_bytes(spec.head_dim, layout.layers_per_block)
    computed = lanes * entry_format("auto", plan.dtype.itemsize).entry_bytes(spec.head_dim)
    if spec.window_heads:
        size, computed = window_plan.token_bytes(plan)
    name, share = f"auto ({dtype})", ""
    if plan.form.quantized:
        name, share = plan.form.name, f", {size / computed:.2f} of {dtype}'s"
    if plan.form.newest:
        newest = window_plan.newest_of(plan.form, policy)
        share += f"; the newest {newest} at most and the first also as computed"
    share += _less(plan)
    rows.append(("kv cache dtype", name, f"{size:g} bytes a token{share}; --kv-cache-dtype"))
    most = most_held(policy.event_trigger, plan.max_len // 2, plan.max_len, layout.block_size)
    longest = plan.blocks_for(plan.max_len)
    rest = _rest_tokens(plan)
    bounded = longest - layout.blocks_for(plan.max_len) + layout.blocks_for(most)
    if rest:
        bounded += -(-(plan.max_len - most) // rest)
        state = f"{plan.block_bytes / rest:g} bytes a token"
        rows.append(("rest", state, "what events do not keep; --policy.rest_bits"))
    mib = f"{num_blocks * plan.block_bytes / 2**20:.0f} MiB" + " a rank" * (ranks > 1)
    rows.append(
        (
            "kv pool",
            f"{num_blocks} blocks of {layout.block_size} tokens, {mib}",
            f"{num_blocks / longest:.1f} sequences of full length, {num_blocks / bounded:.1f} "
            f"as {policy.name} holds them (half prompt, half answer; without logged queries); "
            "--kv-cache-memory",
        )
    )
    chunks = "off", "--enable-chunked-prefill"
    if config.scheduler.enable_chunked_prefill:
        state = f"at most {plan.max_prefill_tokens} tokens beside decodes"
        chunks = state, "--max-prefill-tokens; --no-enable-chunked-prefill"
    rows.append(("chunked prefill", *chunks))
    caching = "on" if config.cache.enable_prefix_caching else "off"
    because = "--enable-prefix-caching"
    for group in plan.groups:
        if group.shown is not None:
            row, because = group.shown
            rows.append(row)
    rows.append(("prefix caching", caching, because))
    kept, why = config.cache.continuations, None
    if kept == "on":
        why = "policy none goes by the prefix cache"
        why = why if policy.name == "none" else continuation_refusal(policy, spec)
    rows.append(("continuations", kept, why or "--continuations"))
    if ranks > 1:
        part, library = spec.part(ranks), "nccl" if plan.device == "cuda" else "gloo"
        state = f"{part.num_heads} query and {part.num_kv_heads} KV heads each"
        why = f"{library}; --tensor-parallel-size"
        rows.append(("tensor parallel", f"{ranks} ranks, {state}", why))
    name, state, why = log_row(plan.log, plan.device)
    weight = log_weight(policy.event_trigger, layout.block_size, plan.log_block_tokens)
    return [*rows, (name, state, why + weight), *_statistics_rows(plan)]


def _rest_tokens(plan: EnginePlan) -> int:
    """Tokens that a block of the rest holds; 0: there is none."""
    if not plan.policy.demands.rest_bits:
        return 0
    from kvserve.scheduler.blocks.rest_group import RestSpec

    return next(group.block_tokens for group in plan.groups if isinstance(group, RestSpec))


def _less(plan: EnginePlan) -> str:
    """What few bits would hold, where they may be had."""
    form, layout = entry_format("3bit", plan.dtype.itemsize), plan.layout
    sizes = layout.head_dim, layout.layers_per_block
    # What is refused with few bits says so where it is asked for.
    if plan.form.few or layout.windows or layout.block_size % TILE or form.refusal(sizes[0]):
        return ""
    times = plan.form.mean_bytes(*sizes) / form.mean_bytes(*sizes)
    return f"; {form.name} holds {times:.1f} times as many tokens" if times > 1 else ""


def _table_rows(plan: EnginePlan, table: EntryTable | None) -> list[Row]:
    """What entries in few bits are written by."""
    if table is None or not plan.form.few:
        return []
    if not table.name:
        return [("entry table", "none", "entries are rounded plainly: the log says why")]
    layers = table.layers(plan.form, plan.layout, plan.spec.layers)
    keys, values = (
        [form.bits for form in x] for x in zip(*(each[:2] for each in layers), strict=True)
    )
    why = (
        f"{mean(keys):.2f} bits of keys and {mean(values):.2f} of values, {min(keys + values)} to "
        f"{max(keys + values)} by layer; kvserve calibrate --entries"
    )
    return [("entry table", table.name[:12], why)]


def log_weight(trigger: Trigger, block_tokens: int, log_block_tokens: int) -> str:
    """What to say of a log of whole windows that takes as much as a window's event frees."""
    if not isinstance(trigger, Periodic) or not trigger.logs:
        return ""
    logged = trigger.window / trigger.log_stride / log_block_tokens
    freed = (trigger.compressible - trigger.keep) / block_tokens
    if not 0 < freed <= logged:
        return ""
    first = trigger.window + (math.ceil(logged / freed) - 1) * trigger.compressible
    return (
        f"; a window's queries take {logged / freed:.1f} times what its event frees: a "
        f"sequence always holds less than under none only from token {first:,} of its answer on"
    )


def _statistics_rows(plan: EnginePlan) -> list[Row]:
    """Where queries point, if the policy asks."""
    if plan.statistics is None or not plan.policy.demands.uses_centres:
        return []
    found = plan.statistics()
    middle = float(found.concentration.median())
    tokens = f"over {found.tokens:,} tokens" if found.tokens else "as released"
    means = "1: all of a head's queries point one way; kvserve calibrate"
    return [("query statistics", f"{tokens}, concentration {middle:.2f}", means)]


def _scheduling_rows(plan: EnginePlan, num_host_blocks: int) -> list[Row]:
    """Which requests run, what preemption does, and events."""
    scheduler, guesses = plan.config.scheduler, plan.speculation
    most = scheduler.max_num_seqs_per_client or scheduler.max_num_seqs
    overlapping = "--async-scheduling; by default on where there is a GPU"
    guessing = "off", "--speculative-config"
    if guesses is not None:
        overlapping += ". Steps with guesses follow known tokens"
        guessing = (
            f"ngram, up to {guesses.num_tokens} tokens",
            f"looks up the newest {guesses.shortest} to {guesses.longest}; none of a row whose "
            f"newest were seldom right, or where more than {guesses.most_rows} rows decode",
        )
    swap = f"swap to {num_host_blocks} host blocks" if num_host_blocks else "recompute"
    recomputed = "what was never compressed, or does not fit, is recomputed"
    return [
        (
            "scheduling",
            f"{scheduler.scheduling_policy}, clients take turns",
            "--scheduling-policy; a client (an API key or else an address) has at most "
            f"{most} sequences running: --max-num-seqs-per-client",
        ),
        ("overlapped steps", "on" if plan.overlaps else "off", overlapping),
        ("speculation", *guessing),
        ("preemption", swap, f"--swap-space; {recomputed}"),
        ("events per step", f"{plan.max_observed_tokens} queries", "--max-num-observed-tokens"),
    ]


def log_row(log: LogForm, device: str) -> Row:
    """How queries are logged, and which policies requests cannot choose because of it."""
    numbers = {"model": "in the model's dtype", "fp8": "as e4m3", "int4": "in 4 bits"}[log.dtype]
    state = {"heads": "all heads", "group_mean": "group means"}[log.reduction] + f" {numbers}"
    others = []
    takes = (log.reduction, log.dtype), (log.reduction, "auto")
    for name in policy_names() if takes[0] != USUAL_LOG else ():
        needed = policy_class(name).needs[:1]
        try:
            policy = make_policy({"name": name, **dict.fromkeys(needed, MOST_TOKENS)})
        except PolicyError:  # a plug-in that needs more arguments
            continue
        form = policy.query_reduction, policy.logged_dtype  # for no model yet
        if policy.query_reduction is not None and form not in takes:
            others.append(name)
    why = "--policy.query_reduce, --policy.query_dtype"
    if others:
        why += f"; requests for {', '.join(others)} are refused unless they log in this form"
    compiled = device == "cpu" and log.dtype == "int4"
    if compiled and (missing := why_missing("window_scores")) is not None:
        why += f"; torch scores with them: {missing}"
    return "query log", state, why
