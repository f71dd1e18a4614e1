"""The ranks that share one model, and how they communicate within a step."""

from __future__ import annotations

from torch import Tensor


class RankGroup:
    """``size`` ranks, each with an equal part of the heads; this one is ``rank``, the first is 0.

    All ranks make the same calls in the same order. This is the group of one rank, which does not
    communicate; ``SharedGroup`` is that of several.
    """

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``, in place."""
        return x

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Every rank's ``x``, equal in shape, one after the other along ``dim``."""
        return x

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of what ``gather`` returns."""
        return x.chunk(self.size, dim)[self.rank]

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's ``x``, in place."""
        return x

    def add_to_fingerprint(self, x: Tensor) -> None:
        """Add integers ``x``, which should be equal on all ranks, to what ``agree`` compares."""

    def agree(self) -> Tensor | None:
        """Whether all ranks added the same since the last call: bool []; ``None`` if nothing."""
        return None


ALONE = RankGroup()
