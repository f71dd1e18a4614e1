"""How many entries are kept."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kvserve.scheduler.arrays import IntArray


@dataclass(frozen=True)
class Budget:
    """Entries to keep of n: a number of ``tokens``, or an exact ``ratio`` of them.

    A ratio is rounded down, or to the nearest if ``nearest``; never below ``least``.
    """

    tokens: int | None = None
    ratio: Fraction | None = None
    least: int = 1
    nearest: bool = False

    def of(self, n: IntArray, seen: IntArray | None = None) -> IntArray:
        """min(n, budget), elementwise; a ratio is a share of the ``seen`` tokens, of which n are
        held (default: n)."""
        if self.ratio is None:
            return np.minimum(n, self.tokens or 0)
        top, bottom = self.ratio.numerator, self.ratio.denominator
        wide = np.asarray(n if seen is None else seen, np.int64)
        kept = (2 * top * wide + bottom) // (2 * bottom) if self.nearest else top * wide // bottom
        return np.minimum(n, np.maximum(kept, self.least))


@dataclass(frozen=True)
class WholeChunks(Budget):
    """Keeps whole chunks of ``chunk`` entries, at least one, and the protected tail behind them.

    The tail begins where the last whole chunk before the newest ``window`` entries ends.
    """

    chunk: int = 1
    window: int = 0

    def of(self, n: IntArray, seen: IntArray | None = None) -> IntArray:
        tail = n - (n - self.window) // self.chunk * self.chunk
        chunks = np.maximum((super().of(n, seen) - tail) // self.chunk, 1)
        return np.where(n < self.window + self.chunk, n, np.minimum(n, chunks * self.chunk + tail))
