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

from kvserve.engine.cache.kept_scores import KeptScores
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.event_parts import EventParts
from kvserve.engine.compression.forwards import QueryRecomputer
from kvserve.engine.compression.moves import Kept, KeptEntries, MovePlan, lane_numbers, lanes_of
from kvserve.engine.compression.observer import (
    Observer,
    Scope,
    Windows,
    at_layers,
    uneven_lengths,
)
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.kernels.move.events import Moves, event_slots
from kvserve.kernels.store.remainder import Remainder
from kvserve.late import Made
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.triggers.trigger import EventKind


class Compressor:
    """Turns the scheduler's observation and compaction tasks into moves on one cache."""

    def __init__(
        self,
        cache: KVCache,
        observer: Observer,
        kept_scores: KeptScores,
        group: RankGroup = ALONE,
        remainders: Remainders | None = None,
    ) -> None:
        self.on_moves: Callable[[Events, MovePlan], None] | None = None
        """Called with every plan before it is carried out, for tracers of positions."""
        self.observer = observer
        self._cache, self._few = cache, cache.form.few
        self._kept_scores = kept_scores
        self._group = group
        self._remainders = remainders

    @classmethod
    def of(cls, parts: EventParts) -> Compressor:
        """That of one rank."""
        model, cache, batch, read = parts.model, parts.cache, parts.batch, parts.statistics
        observer = Observer(
            cache,
            model.scale,
            QueryRecomputer(model, cache, batch, parts.attention),
            group=parts.group,
            remainders=batch.remainders,
            sinks=model.sinks_of_full_layers,
            centres=None if read is None else Made(lambda: read().centres(model)),
        )
        return cls(cache, observer, batch.kept_scores(), parts.group, batch.remainders)

    def run(
        self,
        task: Events,
        policy: Policy,
        block_tables: Tensor,
        log_tables: Tensor,
        on_kept: Callable[[Events, Windows, Tensor], None] | None = None,
    ) -> None:
        """Carry out ``task`` with the tables from before it; events of equal shape run together.
        The scores that the policy keeps of every row are updated in place. ``on_kept`` is called
        before anything of a shape moves, with the places that its windows keep."""
        plan, scope, device = task.plan, self.observer.scope(policy), self._cache.kv.device
        for part, _ in _by_shape(task, plan.window_len, plan.keep, plan.num_queries):
            windows = Windows.of(part, policy.query_places(int(part.plan.num_queries[0])))
            # Before scores are computed, which leaves the CPU's caches full of other things.
            stays = part.scores_alone.any() and self.on_moves is None
            several = (part.plan.windows != 1).any()
            count = (part.plan.windows * part.plan.keep)[:, None, None]
            numbers = lane_numbers(part, count, self._cache.layout, part.copy_start)
            first = to_device(windows.entries, device)[..., None]
            places, left = self._select(part, windows, scope, block_tables, log_tables)
            if on_kept is not None:
                on_kept(part, windows, places)
            if stays:
                continue  # all of them, where they are
            kept = places + first
            del places
            if several:
                kept = _by_event(part, kept)
                left = None if left is None else _one_remainder(part, left)
            self._move(part, scope, kept, numbers, block_tables, left)

    def _select(
        self,
        events: Events,
        windows: Windows,
        scope: Scope,
        block_tables: Tensor,
        log_tables: Tensor,
    ) -> tuple[Tensor, Remainder | None]:
        """The places of every window that equal-shaped events keep, [E', L, Hkv, N], and what is
        left of the others if that is fitted. A function of its own: what was scored is freed before
        anything moves."""
        keep, kept_scores, policy = int(events.plan.keep[0]), None, scope.policy
        if policy.demands.kept_scores:  # [rows, L, Hkv, m]
            kept_scores = self._kept_scores.first(policy.demands.kept_scores)
        # If queries cover all entries, this is the first event: there are no earlier scores.
        first = int(events.plan.num_queries[0]) == windows.length
        earlier = None if first else kept_scores
        pieces: dict[int, list[Tensor]] = {}
        fitted: dict[int, list[Remainder]] = {}
        for some, at, scores, observed in self.observer.observe(
            windows, scope, block_tables, log_tables, earlier
        ):
            chosen = policy.select(scores, windows.length, keep)
            if policy.demands.couples_heads:
                chosen, scores = self._own(chosen, scores)
            if self._few:
                chosen = _with_first(chosen, windows.part(some))
            if kept_scores is not None:
                rows = to_device(windows.rows[some], chosen.device)
                last = chosen[..., keep - policy.carried(keep, windows.length) :]
                kept_scores[rows, at, ..., : last.shape[-1]] = scores.gather(-1, last)
            if scope.fits:
                dropped = _not_in(chosen, windows.length) & observed.exist(windows.length)
                found = policy.remainder_of(observed, dropped)
                fitted.setdefault(some.start, []).append(found)
            pieces.setdefault(some.start, []).append(chosen)
        # Windows, each in pieces of a few layers, as one.
        places = torch.cat([torch.cat(piece, dim=1) for piece in pieces.values()])
        left = None
        if fitted:
            joined = [
                [torch.cat(x, dim=1) for x in zip(*piece, strict=True)] for piece in fitted.values()
            ]
            left = Remainder(*map(torch.cat, zip(*joined, strict=True)))
        return at_layers(places, scope.where), left

    def observe(
        self, events: Events, policy: Policy, block_tables: Tensor, log_tables: Tensor
    ) -> tuple[Tensor, dict[int, Kept]]:
        """What events with uneven counts will keep, by lane and by sequence: counts [E, L, Hkv], or
        columns [E, L, Hkv, K] of whole blocks, -1 behind the last. Events of equal shape run
        together."""
        layout, found, scope = self._cache.layout, dict[int, Kept](), self.observer.scope(policy)
        lanes = len(events.rows), layout.num_layers, layout.num_kv_heads
        size, whole = layout.block_size, events.kind is EventKind.BLOCKS
        shape = (*lanes, int(-(-events.plan.keep.max() // size))) if whole else lanes
        answer = torch.full(shape, -1, dtype=torch.int64, device=self._cache.kv.device)
        for part, at in _by_shape(
            events, uneven_lengths(events), events.plan.keep, events.plan.num_queries
        ):
            for some, chosen in self._choose(part, scope, block_tables, log_tables, whole):
                owners = to_device(at[some], answer.device)
                if whole:
                    columns = chosen.entries[..., ::size] // size
                    answer[owners, ..., : columns.shape[-1]] = columns
                else:
                    answer[owners] = chosen.counts
                found |= {seq: (chosen, i) for i, seq in enumerate(part.seq_ids[some].tolist())}
        return answer, found

    def _choose(
        self, events: Events, scope: Scope, block_tables: Tensor, log_tables: Tensor, whole: bool
    ) -> Iterator[tuple[slice, KeptEntries]]:
        """What equal-shaped events with uneven counts keep, ``whole`` blocks or not, some at a
        time."""
        layout, length, policy = self._cache.layout, int(events.plan.keep[0]), scope.policy
        places = policy.query_places(int(events.plan.num_queries[0]))
        windows = Windows.of_uneven(events, places, layout)
        scored = list[Tensor]()
        for some, layers, scores, observed in self.observer.observe(
            windows, scope, block_tables, log_tables
        ):
            scored.append(scores)
            if layers.stop < scope.count:
                continue
            found = policy.choose(torch.cat(scored, dim=1), windows.length, length)
            indices, counts = found.indices, found.counts
            if policy.demands.couples_heads:
                indices, counts = self._own(indices, counts)
            self._group.add_to_fingerprint(counts)
            if self._few:
                indices = _with_first(indices, windows.part(some), layout.block_size * whole or 1)
                counts = counts.clamp(min=1)
            entries = to_device(windows.entries[some], indices.device)[..., None]
            entries = at_layers(indices, scope.where) + entries
            left = None
            # Where a few layers are scored at a time, the mean is left.
            if scope.fits and len(scored) == 1:
                dropped = _not_in(indices, windows.length, counts) & observed.exist(windows.length)
                left = policy.remainder_of(observed, dropped)
            scored.clear()
            yield some, KeptEntries(entries, at_layers(counts, scope.where), left)

    def run_observed(
        self, events: Events, policy: Policy, found: Mapping[int, Kept], block_tables: Tensor
    ) -> None:
        """Carry out events with the entries that ``observe`` found in an earlier step; those that
        keep whole blocks move nothing."""
        scope = self.observer.scope(policy)
        for part, _ in _by_shape(events, uneven_lengths(events)):
            chosen = [found[owner] for owner in part.seq_ids.tolist()]
            kept = torch.stack([each.entries[i] for each, i in chosen])
            fitted = [each.left.at(i) for each, i in chosen if each.left is not None]
            left = None
            if len(fitted) == len(chosen):
                left = Remainder(*map(torch.stack, zip(*fitted, strict=True)))
            layout, start = self._cache.layout, part.plan.region_start
            counts = lanes_of(part.new_lens, layout) - start[:, None, None]
            start = start if part.kind is EventKind.BLOCKS else part.copy_start
            numbers = lane_numbers(part, counts, layout, start)
            self._move(part, scope, kept, numbers, block_tables, left)

    def tell(self, events: Events, kept: Tensor, counts: IntArray) -> None:
        """Call ``on_moves`` for rows that hold ``kept [E, L, Hkv, C]`` without any move."""
        if self.on_moves is not None:
            self.on_moves(events, MovePlan.staying(kept, counts))

    def _move(
        self,
        events: Events,
        scope: Scope,
        kept: Tensor,
        numbers: IntArray,
        block_tables: Tensor,
        left: Remainder | None,
    ) -> None:
        """Leave of equal-shaped events' regions the entries ``kept [E, L, Hkv, C]``, as
        ``lane_numbers`` say; ``left`` [E, L, Hkv, ...] stands for the others if it is fitted."""
        stays, device = events.kind is EventKind.BLOCKS, kept.device
        if self.on_moves is not None:
            self.on_moves(events, MovePlan.of(kept, numbers))
            if events.scores_alone.any():
                return
        remainders = None if scope.policy.demands.leaves == "off" else self._remainders
        moved = 0 if stays else int(numbers[3].max())
        lost = 0 if remainders is None or left is not None else int(numbers[2].max())
        of_lanes, rows = to_device(numbers, device), to_device(events.rows, device)
        size = self._cache.layout.block_size
        tables = block_tables, rows, to_device(events.dst_blocks, device, torch.int32)
        moves = Moves(kept, of_lanes, moved, lost, *tables, size)
        src, dst, dropped = event_slots(moves)
        if remainders is not None:
            if left is None:
                left = self._cache.entries.mean(dropped, of_lanes[2])
            remainders.add(rows, left)
        if moved:
            self._cache.entries.move(src, dst, runs=len(events.rows))

    def _own(self, *tensors: Tensor) -> list[Tensor]:
        """This rank's heads of what a policy has chosen: ``tensors [E', L', heads, ...]``."""
        self._group.add_to_fingerprint(tensors[0])
        return [self._group.own(tensor, dim=2) for tensor in tensors]


def _by_shape(task: Events, *sizes: IntArray) -> Iterator[tuple[Events, IntArray]]:
    """Yield batches of events that are equal in all of ``sizes [E]``, with their indices."""
    shapes = np.stack(sizes, axis=1)
    if len(shapes) == 1 or (shapes == shapes[0]).all():
        yield task, np.arange(len(shapes))
        return
    for shape in np.unique(shapes, axis=0):
        at = np.flatnonzero((shapes == shape).all(axis=1))
        yield task.part(at), at


def _with_first(chosen: Tensor, windows: Windows, count: int = 1) -> Tensor:
    """The places that windows keep, [E', L', Hkv, N], with a row's ``count`` first entries: of
    entries in few bits attention reads the first one as it was computed, always."""
    if not len(at := np.flatnonzero(windows.begin == 0)):
        return chosen
    first = to_device(-windows.entries[at], chosen.device)[..., None]
    places = first + torch.arange(count, device=chosen.device)
    chosen = chosen.clone()
    chosen[to_device(at, chosen.device), ..., :count] = places
    return chosen


def _by_event(task: Events, kept: Tensor) -> Tensor:
    """Kept entries of all windows, [E', L, Hkv, N, ...], joined by event: [E, L, Hkv, C, ...],
    padded."""
    windows = task.plan.windows
    most = int(windows.max())
    padded = kept.new_zeros(len(windows), most, *kept.shape[1:])
    event = np.repeat(np.arange(len(windows)), windows)
    padded[to_device(event, kept.device), to_device(ragged_arange(windows), kept.device)] = kept
    return padded.movedim(1, 3).flatten(3, 4)


def _one_remainder(task: Events, left: Remainder) -> Remainder:
    """What is left of each window, [E', L, Hkv, ...], as one for each event."""
    windows = task.plan.windows
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


def _not_in(kept: Tensor, length: int, counts: Tensor | None = None) -> Tensor:
    """Which of ``length`` places are not among the first ``counts [...]`` of ``kept [..., N]``
    (default: all of them): bool [..., length]."""
    if counts is not None:
        place = torch.arange(kept.shape[-1], device=kept.device)
        kept = torch.where(place < counts[..., None], kept, length)
    dropped = torch.ones(*kept.shape[:-1], length + 1, dtype=torch.bool, device=kept.device)
    return dropped.scatter_(-1, kept, False)[..., :length]
