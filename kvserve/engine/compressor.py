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
from kvserve.engine.recompute import QueryRecomputer
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

    def __init__(
        self,
        cache: KVCache,
        scale: float,
        recomputer: QueryRecomputer,
        scratch_bytes: int = _SCRATCH_BYTES,
    ) -> None:
        self.on_moves: Callable[[CompactionTask, MovePlan], None] | None = None
        """Called with every plan before it is carried out, for those who follow positions."""
        self._cache = cache
        self._scale = scale
        self._recomputer = recomputer
        self._scratch_bytes = scratch_bytes

    @property
    def workspace_bytes(self) -> int:
        """Most that scoring takes at once, unless a single window needs more."""
        return self._scratch_bytes

    def run(
        self,
        task: CompactionTask,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        kept_scores: Tensor | None = None,
    ) -> None:
        """Carry out ``task`` with the tables as they were before it, events of a shape together.

        ``kept_scores [rows, L, Hkv, m]`` is what the policy's ``kept_scores`` entries of every row
        scored at its last event; it is brought up to date.
        """
        events = task.plan
        shapes = np.stack([events.window_len, events.keep, events.num_queries], axis=1)
        for shape in np.unique(shapes, axis=0):
            part = task.part(np.flatnonzero((shapes == shape).all(axis=1)))
            kept = self._select(part, policy, block_tables, log_tables, kept_scores)
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
        self,
        task: CompactionTask,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        kept_scores: Tensor | None,
    ) -> Tensor:
        """Kept places of every window of equal-shaped events: [E', L, Hkv, N]."""
        cache = self._cache
        length, keep = int(task.plan.window_len[0]), int(task.plan.keep[0])
        heads = self._query_heads(policy)
        leaders = policy.leaders(cache.layout.num_layers)
        scored = sorted(set(leaders))
        layers = torch.tensor(scored, device=block_tables.device)
        num_queries = int(task.plan.num_queries[0])
        windows = _Windows.of(task, policy.query_places(num_queries))
        # Queries that cover all entries are the first event's: nothing has been scored before.
        first = num_queries == length
        step = max(1, self._scratch_bytes // self._window_bytes(length, heads, windows.num_queries))
        parts = []
        for start in range(0, len(windows.rows), step):
            part = windows.part(slice(start, start + step))
            held = _Entries(part.rows, part.entries[:, None] + np.arange(length))
            slots = held.slots(
                block_tables, cache.layout, cache.layout.num_kv_heads, cache.layout.block_size
            )
            keys = held.by_window(gather_keys(cache.kv, slots[layers], layers))
            queries = keys[..., :0, :]
            if policy.recomputed_reduction is not None:
                queries = self._recompute(part, heads)[:, layers]
            elif windows.num_queries:
                queries = self._logged(part, log_tables, layers)
            at = _tensor(part.rows, keys)
            earlier = None if kept_scores is None or first else kept_scores[at]
            scores = policy.score(Observation(queries, keys, self._scale, earlier))
            kept = policy.select(scores, length, keep)
            if kept_scores is not None:
                kept_scores[at, ..., :keep] = scores.gather(-1, kept)
            parts.append(kept)
        where = [scored.index(leader) for leader in leaders]
        return torch.cat(parts)[:, where]

    def _logged(self, windows: _Windows, log_tables: Tensor, layers: Tensor) -> Tensor:
        """Queries of the windows from the log: [E', L', Hlog, Q, D]."""
        cache = self._cache
        logged = _Entries(windows.rows, windows.query_positions)
        slots = logged.slots(log_tables, cache.layout, cache.log_heads, cache.log_block_tokens)
        entries = gather_queries(cache.query_log, slots[layers], layers)
        return logged.by_window(cache.logged(entries))

    def _recompute(self, windows: _Windows, heads: int) -> Tensor:
        """Queries of the windows' own tokens, computed again: [E', L, heads, Q, D]."""
        assert windows.token_ids is not None, "the trigger logs queries"
        entries = windows.entries[:, None] + windows.places
        return self._recomputer.queries(
            windows.rows, windows.token_ids, windows.query_positions, entries, heads
        )

    def _query_heads(self, policy: Policy) -> int:
        """Query vectors that a token is scored with."""
        reduction = policy.recomputed_reduction
        if reduction is None:
            return self._cache.log_heads
        return self._recomputer.heads if reduction == "heads" else self._cache.layout.num_kv_heads

    def _window_bytes(self, length: int, heads: int, num_queries: int) -> int:
        """float32 scratch for one window: logits and probabilities of all layers."""
        layout = self._cache.layout
        logits = 2 * heads * num_queries * length
        entries = 2 * (layout.num_kv_heads * length + heads * num_queries) * layout.head_dim
        return 4 * layout.num_layers * (logits + entries)


@dataclass(frozen=True, slots=True)
class _Windows:
    """E' windows of equal-shaped events; ``places [Q]`` are those of the queries that score them.

    Each has a table row, a first physical entry and the logical position of its first query;
    ``token_ids [E', Q]`` are there if queries are recomputed.
    """

    places: IntArray
    rows: IntArray
    entries: IntArray
    positions: IntArray
    token_ids: IntArray | None

    @classmethod
    def of(cls, task: CompactionTask, places: range) -> _Windows:
        plan, at = task.plan, np.asarray(places, np.int64)
        positions = _window_starts(plan.query_start, plan)
        token_ids = None
        if task.token_ids is not None:
            first = positions - np.repeat(plan.query_start, plan.windows)
            event = np.repeat(np.arange(len(task.rows)), plan.windows)
            token_ids = task.token_ids[event[:, None], first[:, None] + at]
        rows = np.repeat(task.rows, plan.windows)
        return cls(at, rows, _window_starts(plan.region_start, plan), positions, token_ids)

    @property
    def num_queries(self) -> int:
        return len(self.places)

    @property
    def query_positions(self) -> IntArray:
        """Logical: [E', Q]."""
        positions: IntArray = self.positions[:, None] + self.places
        return positions

    def part(self, at: slice) -> _Windows:
        ids = None if self.token_ids is None else self.token_ids[at]
        return _Windows(self.places, self.rows[at], self.entries[at], self.positions[at], ids)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries ``positions [E', S]`` of table rows ``rows [E']``."""

    rows: IntArray
    positions: IntArray

    def slots(self, tables: Tensor, layout: KVLayout, heads: int, block_tokens: int) -> Tensor:
        """[L, heads, E' * S]."""
        lanes = _tensor(self.positions, tables).view(-1).expand(layout.num_layers, heads, -1)
        rows = _tensor(np.repeat(self.rows, self.positions.shape[1]), tables)
        return slot_mapping(tables, rows, lanes, block_tokens)

    def by_window(self, x: Tensor) -> Tensor:
        """[L, heads, E' * S, D] -> [E', L, heads, S, D]."""
        return x.unflatten(2, self.positions.shape).permute(2, 0, 1, 3, 4)


def _window_starts(first: IntArray, plan: EventPlan) -> IntArray:
    """``first`` of every window of every event; neighbours are ``window_len`` apart."""
    strides = np.repeat(plan.window_len, plan.windows)
    starts: IntArray = np.repeat(first, plan.windows) + ragged_arange(plan.windows) * strides
    return starts


def _tensor(array: IntArray, like: Tensor) -> Tensor:
    return torch.as_tensor(array, device=like.device).long()
