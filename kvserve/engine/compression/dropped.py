"""What events drop: its mean goes into the rows' remainders, before anything moves."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.moves import MovePlan, lanes_of
from kvserve.engine.compression.windows import by_window, slots_of
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.output import CompactionTask


class DroppedEntries:
    """Reads the entries of ``cache`` that a plan does not keep."""

    def __init__(self, cache: KVCache, remainders: Remainders) -> None:
        self._cache = cache
        self._remainders = remainders

    def leave(self, task: CompactionTask, plan: MovePlan, block_tables: Tensor) -> None:
        """Add what equal-shaped events drop to the remainders of their rows."""
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
        more = Remainder(keys, values, total[..., 0].log())
        self._remainders.add(to_device(task.rows, device), more)


def _dropped(plan: MovePlan, start: Tensor, held: Tensor, length: int) -> Tensor:
    """1 where the place from ``start`` on is dropped, else 0: float32 [E, L, Hkv, length].

    ``held [E, L, Hkv]`` places exist.
    """
    place = torch.arange(length + 1, device=held.device)
    weights = (place < held[..., None]).float()
    # What does not exist is written behind the last place.
    kept = torch.where(plan.exists, plan.src - start, length)
    return weights.scatter_(-1, kept, 0.0)[..., :length]
