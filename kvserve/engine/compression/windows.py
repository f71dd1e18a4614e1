"""The windows of a batch of equal-shaped events: which entries, which queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.moves import MovePlan, lanes_of
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.events.entry_slots import slots_of_entries
from kvserve.kernels.int4_log import Int4Queries
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.scores.causal_scores import Queries
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import CompactionTask, ObservationTask
from kvserve.scheduler.triggers.trigger import EvictionSpec

Task = TypeVar("Task", bound=ObservationTask)


@dataclass(frozen=True, slots=True)
class Windows:
    """E' windows of ``length`` places; ``places [Q]`` are those of the queries that score them.

    ``entries [E', A, H]`` are the physical entries at place 0, one for all lanes or one for each
    layer and KV head. Lanes that hold less than ``length`` are aligned to the right: entries before
    ``begin [E']`` do not exist. ``positions [E']`` are the logical positions of the first queries;
    ``token_ids [E', Q]`` are given if queries are recomputed.
    """

    length: int
    places: IntArray
    rows: IntArray
    entries: IntArray
    begin: IntArray
    positions: IntArray
    token_ids: IntArray | None

    @classmethod
    def of(cls, task: ObservationTask, places: range) -> Windows:
        """The windows of events whose lanes have equal lengths."""
        plan, at = task.plan, np.asarray(places, np.int64)
        positions = _window_starts(plan.query_start, plan)
        token_ids = None
        if task.token_ids is not None:
            first = positions - np.repeat(plan.query_start, plan.windows)
            event = np.repeat(np.arange(len(task.rows)), plan.windows)
            token_ids = task.token_ids[event[:, None], first[:, None] + at]
        rows, starts = np.repeat(task.rows, plan.windows), _window_starts(plan.region_start, plan)
        length = int(plan.window_len[0])
        return cls(length, at, rows, starts[:, None, None], starts, positions, token_ids)

    @classmethod
    def of_uneven(cls, task: ObservationTask, places: range, layout: KVLayout) -> Windows:
        """One window per event, from the start of its region to the end of each lane."""
        held, begin = lanes_of(task.old_lens, layout), task.plan.region_start
        length = int(uneven_lengths(task)[0])
        at, positions = np.asarray(places, np.int64), task.plan.query_start
        return cls(length, at, task.rows, held - length, begin, positions, None)

    @property
    def query_positions(self) -> IntArray:
        """Logical positions of the queries: [E', Q]."""
        positions: IntArray = self.positions[:, None] + self.places
        return positions

    def held(self, later: int = 0) -> IntArray:
        """Physical entries at all places and at ``later`` ones behind them: [E', A, H, length +
        later]. A number below ``begin`` stands for no entry."""
        held: IntArray = self.entries[..., None] + np.arange(self.length + later)
        return held

    def missing(self, device: torch.device) -> Tensor | None:
        """Places that do not exist, bool [E', L, Hkv, length]; None if all do."""
        begin = self.begin[:, None, None]
        if (self.entries >= begin).all():
            return None
        return to_device(self.held() < begin[..., None], device, torch.bool)

    def part(self, at: slice) -> Windows:
        """The windows ``at`` alone."""
        ids = None if self.token_ids is None else self.token_ids[at]
        return Windows(
            self.length,
            self.places,
            self.rows[at],
            self.entries[at],
            self.begin[at],
            self.positions[at],
            ids,
        )

    def of_layers(self, layers: IntArray | None) -> Windows:
        """The same windows of some layers (``None``: of all)."""
        if layers is None or self.entries.shape[1] == 1:  # entries are as in all layers
            return self
        return replace(self, entries=self.entries[:, layers])


def uneven_lengths(task: ObservationTask) -> IntArray:
    """Entries in the longest lane of each event's region: [E]."""
    longest: IntArray = task.old_lens.max(axis=(0, 2)) - task.plan.region_start
    return longest


def slots_of(
    tables: Tensor,
    rows: IntArray,
    entries: IntArray | Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
    counts: Tensor | None = None,
) -> Tensor:
    """Slots of ``entries [E', A, H, S]`` of table rows ``rows [E']``: [L, heads, E' * S]. Those
    behind the first ``counts [E', A, H]`` of a lane get slot 0."""
    at = entries if isinstance(entries, Tensor) else to_device(entries, tables.device)
    owners = to_device(rows, tables.device)
    return slots_of_entries(tables, owners, at, lanes, block_tokens, counts)


def by_window(x: Tensor, windows: int) -> Tensor:
    """[L, heads, E' * S, ...] -> [E', L, heads, S, ...]."""
    return x.unflatten(2, (windows, -1)).transpose(1, 2).transpose(0, 1)


def queries_by_window(queries: Queries, windows: int) -> Queries:
    """``by_window`` for queries, as numbers or in 4 bits."""
    if isinstance(queries, Tensor):
        return by_window(queries, windows)
    return Int4Queries(*(by_window(part, windows) for part in queries))


def by_shape(task: Task, *sizes: IntArray) -> Iterator[tuple[Task, IntArray]]:
    """Yield batches of events that are equal in all of ``sizes [E]``, with their indices."""
    shapes = np.stack(sizes, axis=1)
    if (shapes == shapes[0]).all():
        yield task, np.arange(len(shapes))
        return
    for shape in np.unique(shapes, axis=0):
        at = np.flatnonzero((shapes == shape).all(axis=1))
        yield task.part(at), at  # type: ignore[misc]


def by_event(task: CompactionTask, kept: Tensor) -> Tensor:
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


def _window_starts(first: IntArray, plan: EvictionSpec) -> IntArray:
    """The starts of all windows of all events: from ``first [E]`` on, ``window_len`` apart."""
    strides = np.repeat(plan.window_len, plan.windows)
    starts: IntArray = np.repeat(first, plan.windows) + ragged_arange(plan.windows) * strides
    return starts


def mean_of_dropped(
    cache: KVCache, task: CompactionTask, plan: MovePlan, start: IntArray, block_tables: Tensor
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


def not_in(kept: Tensor, length: int, counts: Tensor | None = None) -> Tensor:
    """Which of ``length`` places are not among the first ``counts [...]`` of ``kept [..., N]``
    (default: all of them): bool [..., length]."""
    if counts is not None:
        place = torch.arange(kept.shape[-1], device=kept.device)
        kept = torch.where(place < counts[..., None], kept, length)
    dropped = torch.ones(*kept.shape[:-1], length + 1, dtype=torch.bool, device=kept.device)
    return dropped.scatter_(-1, kept, False)[..., :length]


def joined(task: CompactionTask, left: Remainder) -> Remainder:
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
