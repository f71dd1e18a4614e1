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
    KeptEntries,
    MovePlan,
    lanes_of,
    plan_moves,
)
from kvserve.engine.compression.observer import (
    Observer,
    Windows,
    by_window,
    led,
    slots_of,
    uneven_lengths,
)
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.messages.event import EventKind, Events


class Compressor:
    """Turns the scheduler's observation and compaction tasks into moves on one cache."""

    def __init__(
        self,
        cache: KVCache,
        observer: Observer,
        group: RankGroup = ALONE,
        remainders: Remainders | None = None,
    ) -> None:
        self.on_moves: Callable[[Events, MovePlan], None] | None = None
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
        task: Events,
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
        for part, _ in _by_shape(task, plan.window_len, plan.keep, plan.num_queries):
            windows = Windows.of(part, policy.query_places(int(part.plan.num_queries[0])))
            places, left = self._select(
                part, windows, policy, block_tables, log_tables, kept_scores
            )
            kept = _by_event(part, places + _long(windows.entries, places)[..., None])
            chosen = (part.plan.windows * part.plan.keep)[:, None, None]
            moves = plan_moves(part, kept, chosen, layout)
            left = None if left is None else _joined(part, left)
            self._move(part, policy, moves, block_tables, left)

    def observe(
        self, events: Events, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> tuple[Tensor, dict[int, Kept]]:
        """What events with uneven counts will keep, by lane and by sequence: counts [E, L, Hkv], or
        columns [E, L, Hkv, K] of whole blocks, -1 behind the last. Events of equal shape run
        together."""
        layout, found = self._cache.layout, dict[int, Kept]()
        lanes = len(events.rows), layout.num_layers, layout.num_kv_heads
        size, whole = layout.block_size, events.kind is EventKind.BLOCKS
        shape = (*lanes, int(-(-events.plan.keep.max() // size))) if whole else lanes
        answer = torch.full(shape, -1, dtype=torch.int64, device=self._cache.kv.device)
        for part, at in _by_shape(
            events, uneven_lengths(events), events.plan.keep, events.plan.num_queries
        ):
            for some, chosen in self._choose(part, policy, block_tables, log_tables):
                owners = _long(at[some], answer)
                if whole:
                    columns = chosen.entries[..., ::size] // size
                    answer[owners, ..., : columns.shape[-1]] = columns
                else:
                    answer[owners] = chosen.counts
                found |= {seq: (chosen, i) for i, seq in enumerate(part.seq_ids[some].tolist())}
        return answer, found

    def _choose(
        self, events: Events, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> Iterator[tuple[slice, KeptEntries]]:
        """What equal-shaped events with uneven counts keep, some at a time."""
        layout, length = self._cache.layout, int(events.plan.keep[0])
        places = policy.query_places(int(events.plan.num_queries[0]))
        windows = Windows.of_uneven(events, places, layout)
        scope, scored = self.observer.scope(policy), list[Tensor]()
        for some, layers, scores, observed in self.observer.observe(
            windows, policy, block_tables, log_tables
        ):
            scored.append(scores)
            if layers.stop < scope.count:
                continue
            found = policy.choose(torch.cat(scored, dim=1), windows.length, length)
            indices, counts = self._own(policy, found.indices, found.counts)
            self._group.add_to_fingerprint(counts)
            entries = led(indices, scope.where) + _long(windows.entries[some], indices)[..., None]
            left = None
            # Where a few layers are scored at a time, the mean is left.
            if scope.fits and len(scored) == 1:
                dropped = _not_in(indices, windows.length, counts) & observed.exist(windows.length)
                left = policy.remainder_of(observed, dropped)
            scored.clear()
            yield some, KeptEntries(entries, led(counts, scope.where), left)

    def run_observed(
        self,
        events: Events,
        policy: Policy,
        found: Mapping[int, Kept],
        block_tables: Tensor,
    ) -> None:
        """Carry out events with the entries that ``observe`` found in an earlier step; those that
        keep whole blocks move nothing."""
        for part, _ in _by_shape(events, uneven_lengths(events)):
            chosen = [found[owner] for owner in part.seq_ids.tolist()]
            kept = torch.stack([each.entries[i] for each, i in chosen])
            fitted = [each.left.at(i) for each, i in chosen if each.left is not None]
            left = None
            if len(fitted) == len(chosen):
                left = Remainder(*map(torch.stack, zip(*fitted, strict=True)))
            start = part.plan.region_start
            counts = lanes_of(part.new_lens, self._cache.layout) - start[:, None, None]
            if events.kind is not EventKind.BLOCKS:
                plan = plan_moves(part, kept, counts, self._cache.layout)
                self._move(part, policy, plan, block_tables, left)
                continue
            self.tell(part, kept, counts)
            plan = MovePlan(kept, _long(start, kept), _long(counts, kept))
            self._leave(part, policy, plan, start, block_tables, left)

    def tell(self, task: Events, kept: Tensor, counts: IntArray) -> None:
        """Call ``on_moves`` for rows that hold ``kept [E, L, Hkv, C]`` without any move."""
        if self.on_moves is not None:
            start = torch.zeros_like(kept[:, 0, 0, 0])
            self.on_moves(task, MovePlan(kept, start, _long(counts, kept)))

    def _move(
        self,
        task: Events,
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
        task: Events,
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
            more = _mean_of_dropped(self._cache, task, plan, start, block_tables)
        self._remainders.add(_long(task.rows, plan.src), more)

    def _select(
        self,
        task: Events,
        windows: Windows,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        kept_scores: Tensor | None,
    ) -> tuple[Tensor, Remainder | None]:
        """Kept places [E', L, Hkv, N] of every window of equal-shaped events, and what is left of
        the others, [E', L, Hkv, ...], if a policy has fitted that."""
        keep = int(task.plan.keep[0])
        # If queries cover all entries, this is the first event, and there are no earlier scores.
        first = int(task.plan.num_queries[0]) == windows.length
        earlier = None if first else kept_scores
        scope = self.observer.scope(policy)
        parts: dict[int, list[Tensor]] = {}
        left: dict[int, list[Remainder]] = {}
        for some, at, scores, observed in self.observer.observe(
            windows, policy, block_tables, log_tables, earlier
        ):
            chosen = policy.select(scores, windows.length, keep)
            kept, scores = self._own(policy, chosen, scores)
            if kept_scores is not None:
                rows = _long(windows.rows[some], kept)
                kept_scores[rows, at, ..., :keep] = scores.gather(-1, kept)
            if scope.fits:
                dropped = _not_in(kept, windows.length) & observed.exist(windows.length)
                left.setdefault(some.start, []).append(policy.remainder_of(observed, dropped))
            parts.setdefault(some.start, []).append(kept)
        # Windows, each in parts of a few layers, as one.
        places = led(torch.cat([torch.cat(part, dim=1) for part in parts.values()]), scope.where)
        if not left:
            return places, None
        each = [[torch.cat(x, dim=1) for x in zip(*row, strict=True)] for row in left.values()]
        return places, Remainder(*map(torch.cat, zip(*each, strict=True)))

    def _own(self, policy: Policy, *tensors: Tensor) -> list[Tensor]:
        """This rank's heads of what a policy has chosen: ``tensors [E', L', heads, ...]``."""
        if not policy.couples_heads:
            return list(tensors)
        self._group.add_to_fingerprint(tensors[0])
        return [self._group.own(tensor, dim=2) for tensor in tensors]


def _by_shape(task: Events, *sizes: IntArray) -> Iterator[tuple[Events, IntArray]]:
    """Yield batches of events that are equal in all of ``sizes [E]``, with their indices."""
    shapes = np.stack(sizes, axis=1)
    if (shapes == shapes[0]).all():
        yield task, np.arange(len(shapes))
        return
    for shape in np.unique(shapes, axis=0):
        at = np.flatnonzero((shapes == shape).all(axis=1))
        yield task.part(at), at


def _by_event(task: Events, kept: Tensor) -> Tensor:
    """Kept entries of all windows, [E', L, Hkv, N, ...], joined by event: [E, L, Hkv, C, ...],
    padded."""
    windows = task.plan.windows
    if (windows == 1).all():
        return kept
    most = int(windows.max())
    padded = kept.new_zeros(len(windows), most, *kept.shape[1:])
    event = np.repeat(np.arange(len(windows)), windows)
    padded[to_device(event, kept.device), to_device(ragged_arange(windows), kept.device)] = kept
    return padded.movedim(1, 3).flatten(3, 4)


def _joined(task: Events, left: Remainder) -> Remainder:
    """What is left of each window, [E', L, Hkv, ...], as one for each event."""
    windows = task.plan.windows
    if (windows == 1).all():
        return left
    event = np.repeat(np.arange(len(windows)), windows)
    at = to_device(event, left.bias.device), to_device(ragged_arange(windows), left.bias.device)
    shape = len(windows), int(windows.max())
    bias = left.bias.new_full((*shape, *left.bias.shape[1:]), -torch.inf)
    bias[at] = left.bias
    total = bias.logsumexp(dim=1)
    share = torch.exp(bias - total[:, None]).nan_to_num(0.0)[at][..., None]
    keys, values = left.numbers()
    means = total.new_zeros(2, *total.shape, keys.shape[-1])
    for mean, part in zip(means, (keys, values), strict=True):
        mean.index_add_(0, at[0], share * part)
    return Remainder(means[0], means[1], total)


def _mean_of_dropped(
    cache: KVCache, task: Events, plan: MovePlan, start: IntArray, block_tables: Tensor
) -> Remainder:
    """The mean of what equal-shaped events drop from the entries ``start [E]`` on, and the
    logarithm of their number: [E, L, Hkv, ...]. Nothing has moved yet."""
    layout, device = cache.layout, plan.src.device
    counts = lanes_of(task.old_lens, layout) - start[:, None, None]
    held, first = to_device(counts, device), to_device(start, device)[:, None, None, None]
    length = int(counts.max())
    # 1 for what is dropped, else 0. What does not exist is written behind the last place.
    weights = (torch.arange(length + 1, device=device) < held[..., None]).float()
    kept = torch.where(plan.exists, plan.src - first, length)
    weights = weights.scatter_(-1, kept, 0.0)[..., :length]
    # Nothing is there behind a lane's end.
    place = torch.arange(length, device=device).minimum(held[..., None] - 1).clamp(min=0)
    lanes = layout.num_layers, layout.num_kv_heads
    slots = slots_of(block_tables, task.rows, first + place, lanes, layout.block_size)
    number = weights.sum(dim=-1, keepdim=True)
    share = (weights / number.clamp(min=1))[..., None, :]
    keys, values = (
        (share @ by_window(read(slots, None), len(task.rows)).float())[..., 0, :]
        for read in (cache.entries.keys, cache.entries.values)
    )
    return Remainder(keys, values, number[..., 0].log())


def _not_in(kept: Tensor, length: int, counts: Tensor | None = None) -> Tensor:
    """Which of ``length`` places are not among the first ``counts [...]`` of ``kept [..., N]``
    (default: all of them): bool [..., length]."""
    if counts is not None:
        place = torch.arange(kept.shape[-1], device=kept.device)
        kept = torch.where(place < counts[..., None], kept, length)
    dropped = torch.ones(*kept.shape[:-1], length + 1, dtype=torch.bool, device=kept.device)
    return dropped.scatter_(-1, kept, False)[..., :length]


def _long(array: IntArray, like: Tensor) -> Tensor:
    return to_device(array, like.device)
