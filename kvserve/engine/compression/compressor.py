"""Runs events on the cache: observe, score, select, plan, compact. Never inside a forward.

Lengths are known beforehand (the scheduler has already accounted for them), so nothing is read
back from the device. Where a policy keeps unequal counts, an event takes two steps: it is observed
in one, its counts go to the host with that step's tokens, and it is carried out in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.moves import (
    Kept,
    KeptOfEvents,
    MovePlan,
    SelectedWindows,
    lanes_of,
    plan_moves,
)
from kvserve.engine.compression.observer import Observer, led
from kvserve.engine.compression.windows import (
    Windows,
    by_event,
    by_shape,
    joined,
    mean_of_dropped,
    not_in,
    slots_of,
    uneven_lengths,
)
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import CompactionTask, ObservationTask


class Compressor:
    """Turns the scheduler's observation and compaction tasks into moves on one cache."""

    def __init__(
        self,
        cache: KVCache,
        observer: Observer,
        group: RankGroup = ALONE,
        remainders: Remainders | None = None,
    ) -> None:
        self.on_moves: Callable[[CompactionTask, MovePlan], None] | None = None
        """Called with every plan before it is carried out, for tracers of positions."""
        self.observer = observer
        self._cache = cache
        self._group = group
        self._remainders = remainders

    @property
    def workspace_bytes(self) -> int:
        """Most that scoring takes at once, unless a single window needs more."""
        return self.observer.scratch_bytes

    def run(
        self,
        task: CompactionTask,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        kept_scores: Tensor | None = None,
    ) -> None:
        """Carry out ``task`` with the tables from before it; events of equal shape run together.

        ``kept_scores [rows, L, Hkv, m]`` are the scores that the policy's ``kept_scores`` entries
        of every row had at its last event; they are updated in place.
        """
        plan, layout = task.plan, self._cache.layout
        for part, _ in by_shape(task, plan.window_len, plan.keep, plan.num_queries):
            windows = Windows.of(part, policy.query_places(int(part.plan.num_queries[0])))
            found = self._select(part, windows, policy, block_tables, log_tables, kept_scores)
            places = found.places
            kept = by_event(part, places + _long(windows.entries, places)[..., None])
            chosen = (part.plan.windows * part.plan.keep)[:, None, None]
            left = None if found.left is None else joined(part, found.left)
            moves = plan_moves(part, kept, chosen, layout)
            self._move(part, policy, moves, block_tables, left)

    def choices(
        self, task: ObservationTask, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> Iterator[KeptOfEvents]:
        """What events with uneven counts will keep; events of equal shape run together."""
        layout = self._cache.layout
        sizes = uneven_lengths(task), task.plan.keep, task.plan.num_queries
        for part, at in by_shape(task, *sizes):
            places = policy.query_places(int(part.plan.num_queries[0]))
            windows, length = Windows.of_uneven(part, places, layout), int(part.plan.keep[0])
            leaders, where = self.observer.leaders(policy)
            count, scored = len(leaders if leaders is not None else range(layout.num_layers)), []
            for some, layers, scores, observed in self.observer.observe(
                windows, policy, leaders, block_tables, log_tables
            ):
                scored.append(scores)
                if layers.stop < count:
                    continue
                found = policy.choose(torch.cat(scored, dim=1), windows.length, length)
                indices, counts = self._own(policy, found.indices, found.counts)
                self._group.add_to_fingerprint(counts)
                entries = led(indices, where) + _long(windows.entries[some], indices)[..., None]
                left = None
                # Where a few layers are scored at a time, the mean is left.
                if self.observer.fits(policy) and len(scored) == 1:
                    dropped = not_in(indices, windows.length, counts)
                    dropped &= observed.exist(windows.length)
                    left = policy.remainder_of(observed, dropped)
                scored.clear()
                counts = led(counts, where)
                yield KeptOfEvents(at[some], part.seq_ids[some], entries, counts, left)

    def observe(
        self, task: ObservationTask, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> tuple[Tensor, dict[int, Kept]]:
        """All ``choices``: counts [E, L, Hkv], and entries by sequence."""
        layout, kept = self._cache.layout, dict[int, Kept]()
        lanes = len(task.rows), layout.num_layers, layout.num_kv_heads
        counts = torch.zeros(lanes, dtype=torch.int64, device=self._cache.kv.device)
        for choice in self.choices(task, policy, block_tables, log_tables):
            counts[_long(choice.events, counts)] = choice.counts
            kept |= choice.by_sequence()
        return counts, kept

    def run_observed(
        self,
        task: CompactionTask,
        policy: Policy,
        found: Mapping[int, Kept],
        block_tables: Tensor,
        *,
        in_place: bool = False,
    ) -> None:
        """Carry out events with the entries that ``choices`` found in an earlier step; events that
        keep whole blocks ``in_place`` move nothing."""
        for part, kept, counts, left in self._of_observed(task, found):
            if not in_place:
                plan = plan_moves(part, kept, counts, self._cache.layout)
                self._move(part, policy, plan, block_tables, left)
                continue
            self.tell(part, kept, counts)
            start = part.plan.region_start
            plan = MovePlan(kept, _long(start, kept), _long(counts, kept))
            self._leave(part, policy, plan, start, block_tables, left)

    def _of_observed(
        self, task: CompactionTask, found: Mapping[int, Kept]
    ) -> Iterator[tuple[CompactionTask, Tensor, IntArray, Remainder | None]]:
        """Equal-shaped events, their kept entries [E', L, Hkv, C], how many of these exist, and
        what is left of the others if that is fitted."""
        for part, _ in by_shape(task, uneven_lengths(task)):
            owners = [found[owner] for owner in part.seq_ids.tolist()]
            kept = torch.stack([each.entries for each in owners])
            fitted = [each.left for each in owners if each.left is not None]
            left = None
            if len(fitted) == len(owners):
                left = Remainder(*map(torch.stack, zip(*fitted, strict=True)))
            held = lanes_of(part.new_lens, self._cache.layout)
            yield part, kept, held - part.plan.region_start[:, None, None], left

    def tell(self, task: CompactionTask, kept: Tensor, counts: IntArray) -> None:
        """Call ``on_moves`` for rows that hold ``kept [E, L, Hkv, C]`` without any move."""
        if self.on_moves is not None:
            start = torch.zeros_like(kept[:, 0, 0, 0])
            self.on_moves(task, MovePlan(kept, start, _long(counts, kept)))

    def _move(
        self,
        task: CompactionTask,
        policy: Policy,
        plan: MovePlan,
        block_tables: Tensor,
        left: Remainder | None = None,
    ) -> None:
        """Carry out a plan; ``left`` [E, L, Hkv, ...] stands for what it drops if it is fitted."""
        if self.on_moves is not None:
            self.on_moves(task, plan)
        self._leave(task, policy, plan, task.copy_start, block_tables, left)
        layout = self._cache.layout
        lanes, size = (layout.num_layers, layout.num_kv_heads), layout.block_size
        src = slots_of(block_tables, task.rows, plan.src, lanes, size)
        # Slots after the event; entries behind the counts do not exist, and get slot 0.
        ends = (task.copy_start % size)[:, None, None, None] + np.arange(plan.src.shape[-1])
        tables = to_device(task.dst_blocks, plan.counts.device, torch.int32)
        dst = slots_of(tables, np.arange(len(task.rows)), ends, lanes, size, plan.counts)
        self._cache.entries.move(src, dst, runs=len(task.rows))

    def _leave(
        self,
        task: CompactionTask,
        policy: Policy,
        plan: MovePlan,
        start: IntArray,
        block_tables: Tensor,
        left: Remainder | None,
    ) -> None:
        """Add what a plan drops from the entries ``start [E]`` on to the rows' remainders."""
        if policy.leaves == "off" or self._remainders is None:
            return
        more = left
        if more is None:
            more = mean_of_dropped(self._cache, task, plan, start, block_tables)
        self._remainders.add(_long(task.rows, plan.src), more)

    def _select(
        self,
        task: CompactionTask,
        windows: Windows,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        kept_scores: Tensor | None,
    ) -> SelectedWindows:
        """What is kept of every window of equal-shaped events."""
        keep = int(task.plan.keep[0])
        # If queries cover all entries, this is the first event, and there are no earlier scores.
        first = int(task.plan.num_queries[0]) == windows.length
        earlier = None if first else kept_scores
        leaders, where = self.observer.leaders(policy)
        found: dict[int, list[SelectedWindows]] = {}
        for some, at, scores, observed in self.observer.observe(
            windows, policy, leaders, block_tables, log_tables, earlier
        ):
            chosen = policy.select(scores, windows.length, keep)
            kept, scores = self._own(policy, chosen, scores)
            if kept_scores is not None:
                rows = _long(windows.rows[some], kept)
                kept_scores[rows, at, ..., :keep] = scores.gather(-1, kept)
            left = None
            if self.observer.fits(policy):
                dropped = not_in(kept, windows.length) & observed.exist(windows.length)
                left = policy.remainder_of(observed, dropped)
            found.setdefault(some.start, []).append(SelectedWindows(kept, left))
        return SelectedWindows.joined(list(found.values())).led(where)

    def _own(self, policy: Policy, *tensors: Tensor) -> list[Tensor]:
        """This rank's heads of what a policy has chosen: ``tensors [E', L', heads, ...]``."""
        if not policy.couples_heads:
            return list(tensors)
        self._group.add_to_fingerprint(tensors[0])
        return [self._group.own(tensor, dim=2) for tensor in tensors]


def _long(array: IntArray, like: Tensor) -> Tensor:
    return to_device(array, like.device)
