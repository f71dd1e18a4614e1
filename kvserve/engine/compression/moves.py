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
    def staying(cls, src: Tensor, counts: IntArray) -> MovePlan:
        """Entries that rows hold without any move; ``counts [E, L, Hkv]`` of them exist."""
        return cls(src, torch.zeros_like(src[:, 0, 0, 0]), to_device(counts, src.device))


def plan_moves(task: Events, kept: Tensor, chosen: IntArray, layout: KVLayout) -> MovePlan:
    """Plan events: entries before the region stay, then come kept ones, then all behind windows.

    kept: int64 [E, L, Hkv, C], physical entries; the first ``chosen [E, L, Hkv]`` ascend and count.
    """
    old, new = lanes_of(task.old_lens, layout), lanes_of(task.new_lens, layout)
    start = task.copy_start[:, None, None]
    counts, before = new - start, task.plan.region_start[:, None, None] - start
    numbers = np.stack(np.broadcast_arrays(start, before, chosen, old - new, counts))
    of_lanes = to_device(numbers, kept.device)
    src = moved_entries(kept, of_lanes, int(counts.max()))
    return MovePlan(src, of_lanes[0, :, 0, 0], of_lanes[4])


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
