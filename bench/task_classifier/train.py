"""Train the task classifier that ships, and print how it does on templates it has not seen.

    python -m bench.task_classifier.train [--out kvserve/data/windowkv_classifier/weights.npz]

Deterministic: the same seed gives the same weights. Numpy only, about a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.task_classifier.samples import Sample, samples
from kvserve.engine.frontend.task_classifier import (
    NUM_BUCKETS,
    SHIPPED,
    HashedClassifier,
    features,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Matrix:
    """Sparse rows: entry i is ``values[i]`` in row ``rows[i]`` and column ``columns[i]``."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: Array
    num_rows: int

    @classmethod
    def of(cls, prompts: Sequence[str]) -> Matrix:
        made = [features(prompt) for prompt in prompts]
        sizes = [len(buckets) for buckets, _ in made]
        return cls(
            np.repeat(np.arange(len(made)), sizes),
            np.concatenate([buckets for buckets, _ in made]),
            np.concatenate([values for _, values in made]).astype(np.float64),
            len(made),
        )

    def times(self, weights: Array) -> Array:
        terms = self.values * weights[self.columns]
        return np.bincount(self.rows, terms, minlength=self.num_rows).astype(np.float64)

    def transposed_times(self, residual: Array) -> Array:
        terms = self.values * residual[self.rows]
        return np.bincount(self.columns, terms, minlength=NUM_BUCKETS).astype(np.float64)


def fit(matrix: Matrix, labels: Array, decay: float, steps: int) -> tuple[Array, float]:
    """Logistic regression by accelerated gradient descent; both labels weigh alike."""
    share = labels.mean()
    importance = np.where(labels > 0, 0.5 / share, 0.5 / (1 - share)) / len(labels)
    rate = 1 / (0.25 * importance.max() * len(labels) + decay)
    weights = ahead = np.zeros(NUM_BUCKETS)
    bias = bias_ahead = 0.0
    for step in range(steps):
        logits = matrix.times(ahead) + bias_ahead
        residual = importance * (1 / (1 + np.exp(-logits)) - labels)
        new = ahead - rate * (matrix.transposed_times(residual) + decay * ahead)
        new_bias = bias_ahead - rate * float(residual.sum())
        momentum = step / (step + 3)
        ahead = new + momentum * (new - weights)
        bias_ahead = new_bias + momentum * (new_bias - bias)
        weights, bias = new, new_bias
    return weights, bias


def train(
    per_kind: int, seed: int, decay: float = 2e-5, steps: int = 400
) -> tuple[NDArray[np.int8], float, float]:
    """Weights in 8 bits, their scale, and the bias."""
    made = samples(per_kind, seed, held_out=False)
    labels = np.array([sample.localization for sample in made], np.float64)
    weights, bias = fit(Matrix.of([sample.prompt for sample in made]), labels, decay, steps)
    scale = float(np.abs(weights).max()) / 127
    return np.rint(weights / scale).astype(np.int8), scale, bias


@dataclass(frozen=True)
class Figures:
    """How often a classifier is right; localization is the positive class."""

    accuracy: float
    precision: float
    recall: float
    f1: float

    @classmethod
    def of(cls, predicted: NDArray[np.bool_], actual: NDArray[np.bool_]) -> Figures:
        hits = int((predicted & actual).sum())
        precision, recall = hits / max(int(predicted.sum()), 1), hits / max(int(actual.sum()), 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-12)
        return cls(float((predicted == actual).mean()), precision, recall, f1)

    def __str__(self) -> str:
        return (
            f"accuracy {self.accuracy:.4f}, precision {self.precision:.4f}, "
            f"recall {self.recall:.4f}, F1 {self.f1:.4f}"
        )


def evaluate(classifier: HashedClassifier, made: Sequence[Sample]) -> Figures:
    predicted = np.array([classifier.task(sample.prompt) == "localization" for sample in made])
    return Figures.of(predicted, np.array([sample.localization for sample in made]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help=f"write the weights here ({SHIPPED} ships)")
    parser.add_argument("--per-kind", type=int, default=350, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    weights, scale, bias = train(args.per_kind, args.seed)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(args.out, weights=weights, scale=scale, bias=bias)
    classifier = HashedClassifier(weights, scale, bias)
    held_out = samples(60, args.seed + 1, held_out=True)
    lines = [f"{len(held_out)} prompts of held-out templates: {evaluate(classifier, held_out)}"]
    for kind in dict.fromkeys(sample.kind for sample in held_out):
        mine = [sample for sample in held_out if sample.kind == kind]
        lines.append(f"  {kind}: accuracy {evaluate(classifier, mine).accuracy:.3f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
