"""What an event drops joins what its row had lost before."""

from __future__ import annotations

from torch import Tensor

from kvserve.kernels.cpu import remainder as cpu
from kvserve.kernels.remainder import Remainder, merged


def add_remainders(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """Merge ``more [E, L, Hkv, ...]`` into ``whole [L, num_rows, Hkv, ...]`` at ``rows [E]``."""
    if cpu.takes(whole.keys):
        cpu.add_remainders(whole, rows, more)
    else:
        add_remainders_torch(whole, rows, more)


def add_remainders_torch(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """The reference of ``add_remainders``."""
    by_layer = Remainder(*(part.transpose(0, 1) for part in more))
    for part, new in zip(whole, merged(whole.at(slice(None), rows), by_layer), strict=True):
        part[:, rows] = new.to(part.dtype)
