"""What ``GET /v1/kv/stats`` and the metrics show of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvserve.engine.core.step_counts import StepCounts
from kvserve.engine.policies.base import Policy
from kvserve.outputs import EngineStats, RequestStats
from kvserve.scheduler.messages.continuation import MISSES
from kvserve.scheduler.offload.conversations import Conversations
from kvserve.scheduler.step.scheduler import Scheduler


def engine_stats(
    scheduler: Scheduler,
    policies: Mapping[int, Policy],
    counts: StepCounts,
    request_ids: Mapping[int, str],
    block_bytes: int,
    remainder_bytes: int,
    workspace_bytes: int,
) -> EngineStats:
    """Counters and the state of every running request; ``request_ids`` are by sequence id."""
    requests = _requests(scheduler, policies, request_ids, block_bytes, remainder_bytes)
    running = slice(scheduler.rows.num_rows)
    by_kind = scheduler.blocks.held_by_kind(running)
    of_groups: dict[str, Any] = dict(scheduler.blocks.counts(running))
    capacity, free = scheduler.pool.capacity, scheduler.pool.num_free
    cached = scheduler.blocks.num_cached
    return EngineStats(
        num_running=len(requests),
        num_waiting=len(scheduler.waiting),
        blocks_total=capacity,
        blocks_free=free,
        blocks_cached=cached,
        bytes_total=capacity * block_bytes,
        bytes_held=(capacity - free - cached) * block_bytes,
        window_bytes=by_kind["windows"] * block_bytes,
        tokens_logical=sum(request.logical_tokens for request in requests),
        tokens_held=sum(request.held_tokens for request in requests),
        prompt_tokens_total=counts.prompt_tokens,
        generation_tokens_total=counts.generation_tokens,
        preemptions_total=scheduler.num_preemptions,
        swaps_total=scheduler.num_swaps,
        early_compactions_total=scheduler.events.early_compactions,
        compactions_total=scheduler.events.compactions,
        blocks_released_total=scheduler.events.blocks_released,
        tokens_evicted_total=scheduler.events.tokens_evicted,
        compaction_seconds_total=counts.compaction_seconds,
        steps_total=scheduler.num_steps,
        scoring_workspace_bytes=workspace_bytes,
        compaction_counts=counts.compactions,
        drafts_total=counts.drafts,
        draft_tokens_total=counts.draft_tokens,
        accepted_tokens_total=counts.accepted_tokens,
        iterations=counts.iterations,
        iteration_tokens_total=counts.num_tokens,
        requests=requests,
        **of_groups,
        **_of_continuations(scheduler.conversations),
    )


def _requests(
    scheduler: Scheduler,
    policies: Mapping[int, Policy],
    request_ids: Mapping[int, str],
    block_bytes: int,
    remainder_bytes: int,
) -> tuple[RequestStats, ...]:
    """The state of every running request."""
    rows, n = scheduler.rows, scheduler.rows.num_rows
    blocks = scheduler.blocks.held(n).tolist()
    entries = scheduler.blocks.kv_lens[:, :n].sum(axis=(0, 2))
    held = (-(-entries // scheduler.layout.groups)).tolist()
    lanes = scheduler.layout.num_layers * scheduler.layout.num_kv_heads
    logical, compactions = rows.num_computed[:n].tolist(), rows.compactions[:n].tolist()
    return tuple(
        RequestStats(
            request_id=request_ids[seq.seq_id],
            policy=policies[seq.policy_id].name,
            logical_tokens=logical[seq.row],
            held_tokens=held[seq.row],
            blocks=blocks[seq.row],
            compactions=compactions[seq.row],
            held_bytes=blocks[seq.row] * block_bytes
            + rows.has_remainder(seq.row) * remainder_bytes,
            remainder_entries=rows.has_remainder(seq.row) * lanes,
        )
        for seq in scheduler.running
    )


def _of_continuations(conversations: Conversations | None) -> dict[str, Any]:
    """The fields of ``EngineStats`` about continuations; empty if these are off."""
    if conversations is None:
        return {}
    store = conversations.store
    return {
        "continuations": len(store),
        "continuation_blocks": store.num_blocks,
        "hosted_continuations": len(store.host),
        "resumed_total": store.hits,
        "resumed_from_host_total": store.hits_from_host,
        "resumed_tokens_total": store.resumed_tokens,
        "continuation_misses": tuple((cause, store.misses[cause]) for cause in MISSES),
    }
