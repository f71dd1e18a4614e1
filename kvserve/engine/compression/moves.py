"""Plans an event's moves: which entry goes where, given the entries that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.kernels.events.moved_entries import moved_entries
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import CompactionTask


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Where the entries of E events come from: ``src [E, L, Hkv, P]``, physical.

    Entries of lane (e, l, h) go, in order, to the physical places from ``copy_start[e]`` on. Only
    the first ``counts[e, l, h]`` exist; behind them ``src`` is 0. ``copy_start`` is ``[E]``.
    """

    src: Tensor
    copy_start: Tensor
    counts: Tensor

    @property
    def exists(self) -> Tensor:
        """bool [E, L, Hkv, P]."""
        place = torch.arange(self.src.shape[-1], device=self.src.device)
        return place < self.counts[..., None]


def plan_moves(task: CompactionTask, kept: Tensor, chosen: IntArray, layout: KVLayout) -> MovePlan:
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
