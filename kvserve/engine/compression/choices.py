"""What a policy has chosen, on its way from scores to moves."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvserve.kernels.remainder import Remainder
from kvserve.scheduler.block_pool import IntArray


@dataclass(frozen=True, slots=True)
class Kept:
    """What an observed event keeps of its sequence: ``entries [L, Hkv, C]``.

    ``heads`` is as ``Selection.heads``, in the shape of ``entries``; ``left [L, Hkv, ...]`` stands
    for the other entries if that is fitted.
    """

    entries: Tensor
    heads: Tensor | None
    left: Remainder | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """What equal-shaped ``events [E']`` of a task will keep of the sequences ``seq_ids``.

    The first ``counts [E', L, Hkv]`` of ``entries [E', L, Hkv, C]`` are kept; ``heads`` is as
    ``Selection.heads``, in the shape of ``entries``, and ``left [E', L, Hkv, ...]`` as of ``Kept``.
    """

    events: IntArray
    seq_ids: IntArray
    entries: Tensor
    counts: Tensor
    heads: Tensor | None
    left: Remainder | None

    def by_sequence(self) -> dict[int, Kept]:
        """What each sequence keeps."""
        return {
            seq: Kept(
                self.entries[i],
                None if self.heads is None else self.heads[i],
                None if self.left is None else self.left.at(i),
            )
            for i, seq in enumerate(self.seq_ids.tolist())
        }


@dataclass(frozen=True, slots=True)
class SelectedWindows:
    """Kept ``places [E', L, Hkv, N]`` of E' windows, and what a policy has fitted: their new
    ``values [E', L, Hkv, N, D]``, and what is ``left [E', L, Hkv, ...]`` of the other places."""

    places: Tensor
    values: Tensor | None
    left: Remainder | None
