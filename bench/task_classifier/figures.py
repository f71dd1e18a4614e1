"""How often a classifier is right, with intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def wilson(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    share, wide = hits / count, z * z / count
    middle = share + wide / 2
    spread = z * math.sqrt(share * (1 - share) / count + wide / count / 4)
    return (middle - spread) / (1 + wide), (middle + spread) / (1 + wide)


@dataclass(frozen=True)
class Figures:
    """Counts of right and wrong answers; localization is the positive class."""

    hits: int
    rejections: int
    false_alarms: int
    misses: int

    @classmethod
    def of(cls, predicted: NDArray[np.bool_], actual: NDArray[np.bool_]) -> Figures:
        return cls(
            int((predicted & actual).sum()),
            int((~predicted & ~actual).sum()),
            int((predicted & ~actual).sum()),
            int((~predicted & actual).sum()),
        )

    @property
    def count(self) -> int:
        return self.hits + self.rejections + self.false_alarms + self.misses

    @property
    def accuracy(self) -> float:
        return (self.hits + self.rejections) / max(self.count, 1)

    @property
    def recall(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def precision(self) -> float:
        return self.hits / max(self.hits + self.false_alarms, 1)

    @property
    def f1(self) -> float:
        return 2 * self.hits / max(2 * self.hits + self.misses + self.false_alarms, 1)

    def __str__(self) -> str:
        low, high = wilson(self.hits + self.rejections, self.count)
        found, most = wilson(self.hits, self.hits + self.misses)
        return (
            f"n {self.count}, accuracy {self.accuracy:.3f} [{low:.3f}, {high:.3f}], "
            f"precision {self.precision:.3f}, recall {self.recall:.3f} [{found:.3f}, {most:.3f}], "
            f"F1 {self.f1:.3f}"
        )
