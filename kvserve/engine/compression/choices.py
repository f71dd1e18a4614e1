"""What a policy has chosen, on its way from scores to moves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Kept:
    """What an observed event keeps of its sequence: ``entries [L, Hkv, C]``; ``left [L, Hkv, ...]``
    stands for the other entries if that is fitted."""

    entries: Tensor
    left: Remainder | None = None


@dataclass(frozen=True, slots=True)
class KeptOfEvents:
    """What equal-shaped ``events [E']`` of a task will keep of the sequences ``seq_ids``.

    The first ``counts [E', L, Hkv]`` of ``entries [E', L, Hkv, C]`` are kept; ``left [E', L, Hkv,
    ...]`` is as of ``Kept``.
    """

    events: IntArray
    seq_ids: IntArray
    entries: Tensor
    counts: Tensor
    left: Remainder | None

    def by_sequence(self) -> dict[int, Kept]:
        """What each sequence keeps."""
        return {
            seq: Kept(self.entries[i], None if self.left is None else self.left.at(i))
            for i, seq in enumerate(self.seq_ids.tolist())
        }


@dataclass(frozen=True, slots=True)
class SelectedWindows:
    """Kept ``places [E', L, Hkv, N]`` of E' windows, and what is ``left [E', L, Hkv, ...]`` of the
    others if a policy has fitted that."""

    places: Tensor
    left: Remainder | None

    @classmethod
    def joined(cls, parts: list[list[SelectedWindows]]) -> SelectedWindows:
        """Lists of windows, each in parts of a few layers, as one."""
        places = torch.cat([torch.cat([part.places for part in row], dim=1) for row in parts])
        left = [[part.left for part in row if part.left is not None] for row in parts]
        return cls(places, _stacked(left) if left[0] else None)

    def led(self, where: Tensor | None) -> SelectedWindows:
        """What every layer takes over from its leader, ``where [L]`` (``None``: itself)."""
        if where is None:
            return self
        return SelectedWindows(self.places.index_select(1, where), None)


def _stacked(parts: list[list[Remainder]]) -> Remainder:
    rows = [[torch.cat(each, dim=1) for each in zip(*row, strict=True)] for row in parts]
    return Remainder(*map(torch.cat, zip(*rows, strict=True)))
