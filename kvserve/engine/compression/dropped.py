"""What events drop: its mean goes into the rows' remainders, before anything moves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.moves import MovePlan, lanes_of
from kvserve.engine.compression.windows import by_window, slots_of
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.messages.output import CompactionTask


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
