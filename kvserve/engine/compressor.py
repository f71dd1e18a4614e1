"""Runs events on the cache: observe, score, select, plan, compact. Never inside a forward.

Lengths are known beforehand (the scheduler has already accounted for them), so nothing is read
back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.kv_cache import KVCache
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.kernels.compact_kv import compact_kv
from kvserve.kernels.gather_kv import gather_keys, gather_queries
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.scheduler.block_pool import IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import CompactionTask
from kvserve.scheduler.trigger import EventPlan

_SCRATCH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class MovePlan:
    """S entries to copy, event by event: ``src [L, Hkv, S]`` to ``dst [S]``, physical positions."""

    events: Tensor
    src: Tensor
    dst: Tensor


def plan_moves(task: CompactionTask, kept: Tensor) -> MovePlan:
    """Where every entry from ``copy_start`` on comes from.

    kept: int64 [E', L, Hkv, N], ascending places inside each of the E' windows, event by event.
    Per event: entries before the region as they are, each window's kept ones, then everything
    behind the last window.
    """
    plan = task.plan
    before = plan.region_start - task.copy_start
    chosen = plan.windows * plan.keep
    taken = plan.windows * plan.window_len
    after = task.old_lens - plan.region_start - taken
    counts = before + chosen + after
    event = np.repeat(np.arange(len(counts)), counts)
    place = ragged_arange(counts)
    # Entries behind the windows move by what was evicted; `chosen` places are overwritten below.
    behind = place >= (before + chosen)[event]
    src = task.copy_start[event] + place + np.where(behind, (taken - chosen)[event], 0)
    at_kept = np.flatnonzero((place >= before[event]) & ~behind)
    window_start = _window_starts(plan.region_start, plan)
    moved = kept + _tensor(window_start, kept)[:, None, None, None]
    source = _tensor(src, kept).expand(*kept.shape[1:3], -1).clone()
    source[..., _tensor(at_kept, kept)] = moved.permute(1, 2, 0, 3).flatten(2)
    return MovePlan(_tensor(event, kept), source, _tensor(task.copy_start[event] + place, kept))


class Compressor:
    """Turns the scheduler's compaction tasks into moves on one cache."""

    def __init__(self, cache: KVCache, scale: float, scratch_bytes: int = _SCRATCH_BYTES) -> None:
        self.on_moves: Callable[[CompactionTask, MovePlan], None] | None = None
        """Called with every plan before it is carried out, for those who follow positions."""
        self._cache = cache
        self._scale = scale
        self._scratch_bytes = scratch_bytes

    def run(
        self, task: CompactionTask, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> None:
        """Carry out ``task`` with the tables as they were before it, events of a shape together."""
        shapes = np.stack([task.plan.window_len, task.plan.keep], axis=1)
        for shape in np.unique(shapes, axis=0):
            part = task.part(np.flatnonzero((shapes == shape).all(axis=1)))
            kept = self._select(part, policy, block_tables, log_tables)
            plan = plan_moves(part, kept)
            if self.on_moves is not None:
                self.on_moves(part, plan)
            self._move(part, plan, block_tables)

    def _move(self, task: CompactionTask, plan: MovePlan, block_tables: Tensor) -> None:
        layout = self._cache.layout
        size, lanes = layout.block_size, (layout.num_layers, layout.num_kv_heads)
        rows = _tensor(task.rows, plan.src)[plan.events]
        src = slot_mapping(block_tables, rows, plan.src, size)
        first = _tensor(task.copy_start // size * size, plan.src)[plan.events]
        dst_tables = torch.as_tensor(np.ascontiguousarray(task.dst_blocks), device=plan.src.device)
        dst = slot_mapping(dst_tables, plan.events, (plan.dst - first).expand(*lanes, -1), size)
        compact_kv(self._cache.kv, src, dst)

    def _select(
        self, task: CompactionTask, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> Tensor:
        """Kept places of every window of equal-shaped events: [E', L, Hkv, N]."""
        plan, cache = task.plan, self._cache
        length, keep = int(plan.window_len[0]), int(plan.keep[0])
        num_queries = policy.trigger.num_queries
        rows = np.repeat(task.rows, plan.windows)
        physical = _window_starts(plan.region_start, plan)
        logical = _window_starts(plan.query_start, plan)
        leaders = policy.leaders(cache.layout.num_layers)
        scored = sorted(set(leaders))
        layers = torch.tensor(scored, device=block_tables.device)
        step = max(1, self._scratch_bytes // self._window_bytes(length, num_queries))
        parts = []
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            entries = _Entries(rows[part], physical[part], length)
            slots = entries.slots(
                block_tables, cache.layout, cache.layout.num_kv_heads, cache.layout.block_size
            )
            keys = entries.by_window(gather_keys(cache.kv, slots[layers], layers))
            queries = keys[..., :0, :]
            if num_queries:
                logged = _Entries(rows[part], logical[part], num_queries)
                slots = logged.slots(
                    log_tables, cache.layout, cache.log_heads, cache.log_block_tokens
                )
                queries = logged.by_window(gather_queries(cache.query_log, slots[layers], layers))
            scores = policy.score(Observation(queries, keys, self._scale))
            parts.append(policy.select(scores, length, keep))
        where = [scored.index(leader) for leader in leaders]
        return torch.cat(parts)[:, where]

    def _window_bytes(self, length: int, num_queries: int) -> int:
        """float32 scratch for one window: logits and probabilities of all layers."""
        layout, log_heads = self._cache.layout, self._cache.log_heads
        logits = 2 * log_heads * num_queries * length
        entries = 2 * (layout.num_kv_heads * length + log_heads * num_queries) * layout.head_dim
        return 4 * layout.num_layers * (logits + entries)


@dataclass(frozen=True, slots=True)
class _Entries:
    """``length`` consecutive entries from ``starts [E']`` of table rows ``rows [E']``."""

    rows: IntArray
    starts: IntArray
    length: int

    def slots(self, tables: Tensor, layout: KVLayout, heads: int, block_tokens: int) -> Tensor:
        """[L, heads, E' * length]."""
        positions = self.starts[:, None] + np.arange(self.length)
        lanes = _tensor(positions, tables).view(-1).expand(layout.num_layers, heads, -1)
        rows = _tensor(np.repeat(self.rows, self.length), tables)
        return slot_mapping(tables, rows, lanes, block_tokens)

    def by_window(self, x: Tensor) -> Tensor:
        """[L, heads, E' * length, D] -> [E', L, heads, length, D]."""
        return x.unflatten(2, (len(self.rows), self.length)).permute(2, 0, 1, 3, 4)


def _window_starts(first: IntArray, plan: EventPlan) -> IntArray:
    """``first`` of every window of every event; neighbours are ``window_len`` apart."""
    strides = np.repeat(plan.window_len, plan.windows)
    starts: IntArray = np.repeat(first, plan.windows) + ragged_arange(plan.windows) * strides
    return starts


def _tensor(array: IntArray, like: Tensor) -> Tensor:
    return torch.as_tensor(array, device=like.device).long()
