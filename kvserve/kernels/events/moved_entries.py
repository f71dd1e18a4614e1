"""Which entry comes to each place of the rows that events leave."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.cpu import moved_entries as cpu


def moved_entries(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The entries that come, in order, to ``length`` places of each lane: int64 [E, L, H, length].

    kept: int64 [E, L, H, C], the entries that events keep. ``numbers`` int64 [5, E, L, H] are, of
    each lane: the entry of its first place; places before those of kept ones, whose entries stay;
    how many of ``kept`` count; how many entries fewer there are; and how many places exist, behind
    which there is entry 0. Places behind those of kept entries take what came behind them.
    """
    if cpu.takes(kept):
        return cpu.moved_entries(kept, numbers, length)
    return moved_entries_torch(kept, numbers, length)


def moved_entries_torch(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The reference of ``moved_entries``."""
    start, before, chosen, evicted, counts = numbers[..., None].unbind()
    place = torch.arange(length, device=kept.device)
    src = start + place + evicted
    if kept.shape[-1]:
        rank = (place - before).clamp(0, kept.shape[-1] - 1)
        src = torch.where(place < before + chosen, kept.gather(-1, rank), src)
    src = torch.where(place < before, start + place, src)
    return torch.where(place < counts, src, 0)
