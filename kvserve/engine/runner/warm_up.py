"""Launch every kernel of steps and events once on a GPU, before the first request.

A Triton kernel is compiled at its first launch (0.1 to 1.6 s each), and libraries load what they
need at theirs. Without the warm-up, the first requests would wait for this, some of them at their
first event. All tables name only the null block, so no real entry is read or written.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch

from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.triggers.trigger import NO_EVENT, EventKind, RowState

_CHUNKS = (1, 2, 3, 5, 9, 17, 33, 65, 256)
"""Chunk lengths for each of attention's tiles, for GQA groups of up to 64 heads."""


@torch.inference_mode()
def warm_up(runner: ModelRunner, policy: Policy, max_len: int, max_tokens: int) -> None:
    """Warm up steps of up to ``max_tokens`` tokens, and the first event of ``policy``.

    ``policy`` is the engine's; events of requests' own policies are not warmed up. All ranks of a
    model call it together.
    """
    for tokens in {1, 16, min(256, max_tokens), max_tokens}:
        runner.rehearse(tokens)
    _attend(runner, max_tokens, events_too=policy.demands.recomputed_reduction is not None)
    _draw(runner)
    for events in (1, 2):
        if events <= len(runner.batch.last_token):
            rehearse_event(runner, policy, max_len, events)
    runner.group.agree()


def _attend(runner: ModelRunner, max_tokens: int, *, events_too: bool) -> None:
    """Run attention, of a layer with each size of heads, to a chunk for each tile, over contexts of
    growing length (more splits); if the query log holds shares, with those too. Events that attend
    read all entries as they are stored."""
    part, attention, cache = runner.model.part, runner.attention, runner.cache
    sizes = [(0, part.head_dim)]
    if part.window_heads is not None:
        sizes = [(part.layers.full[0], part.head_dim), (min(part.windowed), part.window_heads[1])]
    for tokens, (layer, dim) in product(_CHUNKS, sizes):
        if tokens > max_tokens:
            continue
        batch = runner.batch.padding(tokens)
        most, device = batch.tables.shape[3], batch.tables.device
        q = torch.zeros(tokens, part.num_heads, dim, dtype=cache.dtype, device=device)
        shares = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
        for width in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
            planned = attention.plan(replace(batch, columns=np.array([width])))
            planned(layer, q, cache)
            if cache.logs_shares:
                planned(layer, q, cache, shares)
            if events_too:
                stored = replace(batch, columns=np.array([width]), newest=None, first=None)
                attention.plan(stored)(layer, q, cache)


def _draw(runner: ModelRunner) -> None:
    """Draw tokens for one row and for all, with filters and without."""
    device = runner.batch.device
    hidden = torch.zeros(1, len(runner.model.norm), dtype=runner.cache.dtype, device=device)
    for count in {1, len(runner.batch.last_token)}:
        rows = torch.arange(count, device=device)
        logits = runner.model.logits(hidden.expand(count, -1))
        for filtered in (False, True):
            runner.batch.sampling.draw(logits, rows, rows, filtered=filtered)


@torch.inference_mode()
def rehearse_event(runner: ModelRunner, policy: Policy, max_len: int, events: int) -> None:
    """Run the first event of so many rows; their tables name only the null block, before any row
    has begun."""
    layout = runner.cache.layout
    if policy.demands.event_kind in (EventKind.CODED, EventKind.PRUNED):
        _move(runner)
        _store_rotated(runner)
        return  # the rest of their first events runs torch's operators and attention
    task = first_event(policy, layout, events, min(256, max_len // 2), max_len)
    if task is None:
        return
    tables = runner.batch.block_tables, runner.batch.log_tables
    if not policy.demands.event_kind.is_even:
        _, found = runner.compressor.observe(task, policy, *tables)
        runner.compressor.run_observed(task, policy, found, tables[0])
        return
    runner.compressor.run(task, policy, *tables)
    if runner.batch.remainders is not None:
        runner.batch.remainders.used = False  # nothing was dropped
    if policy.demands.kept_scores:
        runner.batch.kept_scores().first(policy.demands.kept_scores).zero_()


def _store_rotated(runner: ModelRunner) -> None:
    """Rotate and store in two launches, as layers that drop tokens do: they score rotated keys."""
    part, tokens = runner.model.part, 16
    heads, kv_heads, dim = part.num_heads + part.num_kv_heads, part.num_kv_heads, part.head_dim
    qkv = torch.zeros(
        tokens, heads + kv_heads, dim, dtype=runner.cache.dtype, device=runner.batch.device
    )
    cos = sin = qkv.new_zeros(tokens, 1, dim)
    qk, v = qkv.split([heads, kv_heads], dim=1)
    k = runner.model.operators.rotate(qk, cos, sin)[:, part.num_heads :]
    runner.cache.store(0, runner.batch.padding(tokens), k, v)


def _move(runner: ModelRunner) -> None:
    """Gather some entries and logged queries of the null block, and move entries inside of it."""
    cache, device = runner.cache, runner.batch.device
    layers = cache.layout.num_layers
    entries, queries = (
        torch.zeros(layers, heads, 16, dtype=torch.int64, device=device)
        for heads in (cache.layout.num_kv_heads, cache.query_log.heads)
    )
    cache.entries.keys(entries, None)
    cache.query_log.read(queries, None)
    cache.entries.move(entries, entries, runs=1)


def first_event(
    policy: Policy, layout: KVLayout, events: int, prompt: int, longest: int
) -> Events | None:
    """The first event that evicts of ``events`` equal rows with ``prompt`` tokens, or the last one
    up to ``longest`` tokens; ``None`` if there is none. Kept entries go to the null block."""

    def each(value: int) -> IntArray:
        return np.full(events, value, np.int32)

    trigger, zero, size = policy.event_trigger, each(0), layout.block_size
    start = trigger.start(each(prompt))
    due = trigger.next_event(RowState(each(prompt), zero, zero, start, size))
    if due[0] > longest:
        return None
    plan = trigger.plan(now := RowState(each(prompt), due, due, start, size))
    while not plan.evicted[0] and due[0] < (further := trigger.next_event(now))[0] <= longest:
        due = further
        plan = trigger.plan(now := RowState(each(prompt), due, due, start, size))
    width = -(-int((due - plan.evicted)[0]) // size) - int(plan.region_start[0]) // size
    lanes = layout.layer_groups, events, layout.rows
    held = np.broadcast_to(due[None, :, None], lanes).copy()
    rows, token_ids = np.arange(events), None
    if policy.demands.recomputed_reduction is not None:
        span = int((plan.windows * plan.window_len + plan.num_queries).max())
        token_ids = np.zeros((events, span), np.int32)
    left = held - plan.evicted[None, :, None]
    nowhere = np.zeros((*lanes, max(width, 0)), np.int32)
    later = left, plan.region_start, nowhere, each(NO_EVENT)
    return Events(0, EventKind.EVEN, rows, rows, plan, held, token_ids, *later)
