"""What ``GET /v1/kv/stats`` and the metrics show of an engine."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvserve.engine.cache.kv_cache import SCRATCH_BYTES
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.outputs import Compaction
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.stats import ITERATION_TOKENS, CompactionCounts, EngineStats, RequestStats


class EngineCounts:
    """Counts what steps do, in the form of ``EngineStats``."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, block_bytes: int, remainder_bytes: int
    ) -> None:
        """Sizes are those of all ranks together."""
        self._scheduler, self._runner = scheduler, runner
        self._block_bytes, self._remainder_bytes = block_bytes, remainder_bytes
        self._iterations = [0] * (len(ITERATION_TOKENS) + 1)
        self._events: Counter[tuple[str, str]] = Counter()
        self._released: Counter[tuple[str, str]] = Counter()

    def add(self, output: SchedulerOutput) -> list[tuple[int, Compaction]]:
        """Count a step; returns its compactions, each with its sequence."""
        self._iterations[bisect_left(ITERATION_TOKENS, output.num_tokens)] += 1
        self._scheduler.totals.iteration_tokens_total += output.num_tokens
        layout, found = self._scheduler.layout, list[tuple[int, Compaction]]()
        for events in (*output.events.compactions, *output.pruned):
            compacts, reason = events.compacts, "pressure" if events.early else "due"
            key = self._runner.policies[events.policy_id].name, reason
            self._released[key] += int(events.released.sum())
            if not compacts.any():
                continue
            old, now = events.old_lens.sum(axis=(0, 2)), time.time()
            self._events[key] += int(compacts.sum())
            if events.rest is not None:
                old = old + events.rest.before
            held, evicted = -(-(old - events.dropped) // layout.groups), events.dropped
            each = events.seq_ids[compacts], evicted[compacts] // layout.groups, held[compacts]
            for seq_id, *counts in zip(*(x.tolist() for x in each), strict=True):
                found.append((seq_id, Compaction(reason, now, *counts)))
        return found

    def stats(self, request_ids: Mapping[int, str]) -> EngineStats:
        """Counters and the state of every running request; ``request_ids`` are by sequence id."""
        scheduler = self._scheduler
        requests = self._requests(request_ids)
        running = slice(scheduler.rows.num_rows)
        by_kind = scheduler.blocks.held_by_kind(running)
        capacity, free = scheduler.pool.capacity, scheduler.pool.num_free
        cached = scheduler.blocks.num_cached
        kept = self._runner.batch.kept_scores.made
        further: dict[str, Any] = dict(scheduler.blocks.counts(running))
        if scheduler.settings.continuations:
            store = scheduler.saved.store
            further |= {
                "continuations": len(store),
                "continuation_blocks": store.num_blocks,
                "hosted_continuations": store.num_hosted,
                "continuation_misses": tuple(scheduler.saved.misses.items()),
            }
        return replace(
            scheduler.totals,
            num_running=len(requests),
            num_waiting=len(scheduler.waiting),
            blocks_total=capacity,
            blocks_free=free,
            blocks_cached=cached,
            bytes_total=capacity * self._block_bytes,
            bytes_held=(capacity - free - cached) * self._block_bytes,
            window_bytes=by_kind["windows"] * self._block_bytes,
            tokens_logical=sum(request.logical_tokens for request in requests),
            tokens_held=sum(request.held_tokens for request in requests),
            scoring_workspace_bytes=SCRATCH_BYTES + (0 if kept is None else kept.nbytes),
            compaction_counts=tuple(
                CompactionCounts(*key, self._events[key], released)
                for key, released in self._released.items()
                if self._events[key] or released
            ),
            iterations=tuple(self._iterations),
            requests=requests,
            **further,
        )

    def _requests(self, request_ids: Mapping[int, str]) -> tuple[RequestStats, ...]:
        scheduler, rows = self._scheduler, self._scheduler.rows
        blocks = scheduler.blocks.blocks_of_rows(rows.num_rows)
        entries = scheduler.blocks.entries(slice(rows.num_rows))
        held = -(-entries // scheduler.layout.groups)
        lanes = scheduler.layout.num_layers * scheduler.layout.num_kv_heads
        found = []
        for seq in scheduler.running:
            row, left = seq.row, scheduler.rows.has_remainder(seq.row)
            stats = RequestStats(
                request_id=request_ids[seq.seq_id],
                policy=self._runner.policies[seq.policy_id].name,
                logical_tokens=int(rows.num_computed[row]),
                held_tokens=int(held[row]),
                blocks=int(blocks[row]),
                compactions=int(rows.compactions[row]),
                held_bytes=int(blocks[row]) * self._block_bytes + left * self._remainder_bytes,
                remainder_entries=left * lanes,
            )
            found.append(stats)
        return tuple(found)
