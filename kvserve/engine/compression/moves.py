"""What events have chosen, and their moves: which entry goes where, and who follows positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.kernels.move.events import moved_entries
from kvserve.kernels.store.remainder import Remainder
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events


@dataclass(frozen=True, slots=True)
class KeptEntries:
    """What E' observed events keep: the first ``counts [E', L, Hkv]`` of ``entries [E', L, Hkv,
    C]``. ``left [E', L, Hkv, ...]`` stands for the others, if a policy has fitted that."""

    entries: Tensor
    counts: Tensor
    left: Remainder | None


Kept = tuple[KeptEntries, int]
"""What one event keeps: number ``int`` of those that were selected with it."""


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Where the entries of E events come from: ``src [E, L, Hkv, P]``, physical.

    Entries of lane (e, l, h) go, in order, to the physical places from ``copy_start[e]`` on. Only
    the first ``counts[e, l, h]`` exist; behind them ``src`` is 0. ``copy_start`` is ``[E]``.
    """

    src: Tensor
    copy_start: Tensor
    counts: Tensor

    @classmethod
    def of(cls, kept: Tensor, numbers: IntArray) -> MovePlan:
        """That of events that keep ``kept``, with their ``lane_numbers``."""
        of_lanes = to_device(numbers, kept.device)
        src = moved_entries(kept, of_lanes, int(numbers[3].max()))
        return cls(src, of_lanes[0, :, 0, 0], of_lanes[3])

    @classmethod
    def staying(cls, src: Tensor, counts: IntArray) -> MovePlan:
        """Entries that rows hold without any move; ``counts [E, L, Hkv]`` of them exist."""
        return cls(src, torch.zeros_like(src[:, 0, 0, 0]), to_device(counts, src.device))


def lane_numbers(task: Events, chosen: IntArray, layout: KVLayout, start: IntArray) -> IntArray:
    """What ``moved_entries`` and ``dropped_entries`` ask of every lane, [7, E, L, Hkv]: of the
    region ``chosen [E, L, Hkv]`` are kept, and all around it. Places begin at ``start [E]``."""
    groups, events, tables = task.old_lens.shape
    numbers = np.empty((7, events, layout.num_layers, layout.num_kv_heads), np.int64)
    shape = events, groups, layout.layers_per_block, tables, layout.heads_per_block
    by_group, place = numbers.reshape(7, *shape), start[:, None, None]
    old, new = (x.swapaxes(0, 1)[:, :, None, :, None] for x in (task.old_lens, task.new_lens))
    first = task.plan.region_start[:, None, None]
    numbers[0], numbers[1], numbers[4], numbers[6] = place, first - place, first, chosen
    by_group[2], by_group[3] = old - new, new - place[..., None, None]
    np.add(numbers[2], chosen, out=numbers[5])
    return numbers


def lanes_of(lens: IntArray, layout: KVLayout) -> IntArray:
    """Lengths by KV group, [LG, E, R], as lengths by layer and KV head, [E, L, Hkv]."""
    by_layer = np.repeat(lens.transpose(1, 0, 2), layout.layers_per_block, axis=1)
    return np.asarray(np.repeat(by_layer, layout.heads_per_block, axis=2))


def groups_of(counts: Tensor, layout: KVLayout) -> Tensor:
    """Counts by layer and KV head, [E, L, Hkv], as counts by KV group, [LG, E, R]."""
    return counts[:, :: layout.layers_per_block, :: layout.heads_per_block].transpose(0, 1)


class LanePositions:
    """``lanes[layer][head]`` are positions in the order of the cache, of ``seen`` tokens so far."""

    def __init__(self, layers: int, heads: int) -> None:
        self.lanes = [[np.zeros(0, np.int32) for _ in range(heads)] for _ in range(layers)]
        self.seen = 0

    def see(self, seen: int) -> None:
        """Append the tokens up to ``seen`` to every lane."""
        new = np.arange(self.seen, seen, dtype=np.int32)
        self.lanes = [[np.concatenate([lane, new]) for lane in row] for row in self.lanes]
        self.seen = seen

    def see_longest(self, length: int) -> None:
        """Append tokens until the longest lane is ``length`` long."""
        self.see(self.seen + length - max(len(lane) for row in self.lanes for lane in row))

    def move(self, start: int, source: IntArray, counts: IntArray) -> None:
        """Follow one event of a ``MovePlan``: ``source [L, Hkv, P]``, ``counts [L, Hkv]``."""
        self.lanes = [
            [
                np.concatenate([lane[:start], lane[source[layer, head, : counts[layer, head]]]])
                for head, lane in enumerate(row)
            ]
            for layer, row in enumerate(self.lanes)
        ]

    def padded(self) -> IntArray:
        """The positions as [L, Hkv, n]; shorter lanes are padded with -1."""
        longest = max(len(lane) for row in self.lanes for lane in row)
        padded = np.full((len(self.lanes), len(self.lanes[0]), longest), -1, np.int32)
        for layer, row in enumerate(self.lanes):
            for head, lane in enumerate(row):
                padded[layer, head, : len(lane)] = lane
        return padded
