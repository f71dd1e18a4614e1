"""The papers' needle heatmap: one secret number at every depth of texts of every length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from kvserve.benchmarks.datasets.task_text import needle_at
from kvserve.benchmarks.datasets.tasks import Grade, grade_finals
from kvserve.benchmarks.datasets.workload import TaskPrompts
from kvserve.engine.frontend.tokenizer import Tokenizer

NAME = "needle-grid"
_OTHERS = 7
_MAX_NEW_TOKENS = 8


@dataclass(frozen=True)
class NeedleGrid:
    """Text lengths in tokens of the shipped tokenizer, and depths from 0 (first) to 1 (last)."""

    lengths: Sequence[int]
    depths: Sequence[float]
    per_cell: int

    def prompts(self, tokenizer: Tokenizer, seed: int) -> TaskPrompts:
        samples = [
            needle_at(random.Random(f"{NAME}/{seed}/{length}/{depth}/{i}"), length, depth, _OTHERS)
            for length, depth in product(self.lengths, self.depths)
            for i in range(self.per_cell)
        ]
        return TaskPrompts(samples, tokenizer, _MAX_NEW_TOKENS, grade_finals)

    def table(self, grades: Sequence[Grade]) -> dict[str, Any]:
        """Exact match by length and depth: ``exact_match [lengths, depths]``."""
        cells = np.array([each.exact for each in grades], float)
        shape = len(self.lengths), len(self.depths), -1
        return {
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "exact_match": cells.reshape(shape).mean(2).round(4).tolist(),
        }
