"""What events drop: its mean goes into the rows' remainders, before anything moves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.moves import MovePlan, lanes_of
from kvserve.engine.compression.windows import by_window, slots_of
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.block_pool import ragged_arange
from kvserve.scheduler.output import CompactionTask


class DroppedEntries:
    """Reads the entries of ``cache`` that a plan does not keep."""

    def __init__(self, cache: KVCache, remainders: Remainders) -> None:
        self._cache = cache
        self._remainders = remainders

    def leave(
        self,
        task: CompactionTask,
        plan: MovePlan,
        block_tables: Tensor,
        fitted: Remainder | None = None,
    ) -> None:
        """Add what equal-shaped events drop to the remainders of their rows: what is ``fitted`` to
        it [E, L, Hkv, ...], or its mean."""
        more = self._mean(task, plan, block_tables) if fitted is None else fitted
        self._remainders.add(to_device(task.rows, plan.src.device), more)

    def _mean(self, task: CompactionTask, plan: MovePlan, block_tables: Tensor) -> Remainder:
        layout, device = self._cache.layout, plan.src.device
        old = lanes_of(task.old_lens, layout)
        held = to_device(old - task.copy_start[:, None, None], device)
        length = int((old - task.copy_start[:, None, None]).max())
        start = plan.copy_start[:, None, None, None]
        weights = _dropped(plan, start, held, length)
        # Nothing is there behind a lane's end.
        place = torch.arange(length, device=device)
        entries = start + place.minimum(held[..., None] - 1).clamp(min=0)
        lanes = layout.num_layers, layout.num_kv_heads
        slots = slots_of(block_tables, task.rows, entries, lanes, layout.block_size)
        total = weights.sum(dim=-1, keepdim=True)
        share = weights / total.clamp(min=1)
        keys, values = (
            (share[..., None, :] @ by_window(read(slots, None), len(task.rows)).float())[..., 0, :]
            for read in (self._cache.entries.keys, self._cache.entries.values)
        )
        return Remainder(keys, values, total[..., 0].log())


def not_in(kept: Tensor, length: int) -> Tensor:
    """Which of ``length`` places are not ``kept [..., N]``: bool [..., length]."""
    dropped = torch.ones(*kept.shape[:-1], length, dtype=torch.bool, device=kept.device)
    return dropped.scatter_(-1, kept, False)


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


def _dropped(plan: MovePlan, start: Tensor, held: Tensor, length: int) -> Tensor:
    """1 where the place from ``start`` on is dropped, else 0: float32 [E, L, Hkv, length].

    ``held [E, L, Hkv]`` places exist.
    """
    place = torch.arange(length + 1, device=held.device)
    weights = (place < held[..., None]).float()
    # What does not exist is written behind the last place.
    kept = torch.where(plan.exists, plan.src - start, length)
    return weights.scatter_(-1, kept, 0.0)[..., :length]
