"""Train the task classifier that ships, and print how it does on phrasings it has not seen.

    python -m bench.task_classifier.train [--out kvserve/data/windowkv_classifier/weights.npz]

Eight trainings hold out each family of phrasing once; the weights come from a ninth training on all
of them. Deterministic: the same seed gives the same weights. Numpy only, some minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.task_classifier.figures import Figures
from bench.task_classifier.samples import Sample, samples
from kvserve.engine.frontend.prompt_segments import hashes, segments, shape
from kvserve.engine.frontend.task_classifier import SHIPPED, HashedClassifier

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
FOLDS = 8
_RARE = 4  # a feature in fewer sentences has no weight
_FAINT = 0.02  # a sentence with a smaller share in its prompt is left out of training
_ASK_DECAY, _TASK_DECAY, _RATE = 3e-4, 3e-6, 0.3


@dataclass(frozen=True)
class Matrix:
    """Sparse rows: entry i is ``values[i]`` in row ``rows[i]`` and column ``columns[i]``."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: Array
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, keys: NDArray[np.uint32], features: Sequence[NDArray[np.uint32]]) -> Matrix:
        """Each row's features that are among ``keys``, weighted by 1 over the root of the row's
        count."""
        sizes = np.array([len(row) for row in features])
        rows = np.repeat(np.arange(len(features)), sizes)
        flat = np.concatenate(features)
        columns = np.searchsorted(keys, flat).clip(max=len(keys) - 1)
        known = keys[columns] == flat
        values = 1 / np.sqrt(sizes[rows[known]])
        return cls(rows[known], columns[known], values, len(features), len(keys))

    def times(self, weights: Array) -> Array:
        terms = self.values * weights[self.columns]
        return np.bincount(self.rows, terms, minlength=self.num_rows).astype(np.float64)

    def transposed_times(self, residual: Array) -> Array:
        terms = self.values * residual[self.rows]
        return np.bincount(self.columns, terms, minlength=self.num_columns).astype(np.float64)

    def pooled(self, into: NDArray[np.int64], weights: Array, num_rows: int) -> Matrix:
        """Rows times ``weights``, summed into the rows ``into``; rows without a weight are left
        out."""
        entry = weights[self.rows]
        used = entry > 0
        rows = into[self.rows[used]]
        return Matrix(
            rows, self.columns[used], self.values[used] * entry[used], num_rows, self.num_columns
        )

    def chosen(self, rows: Flags) -> Matrix:
        used = rows[self.rows]
        renumbered = np.cumsum(rows) - 1
        return Matrix(
            renumbered[self.rows[used]],
            self.columns[used],
            self.values[used],
            int(rows.sum()),
            self.num_columns,
        )


Slope = Callable[[Array], Array]


def descend(matrix: Matrix, slope: Slope, decay: float, steps: int) -> tuple[Array, float]:
    """Weights and bias by Adam over all rows at once; ``slope`` gives the loss's slope at the
    logits."""
    weights = mean = square = np.zeros(matrix.num_columns + 1)  # the bias comes last
    for step in range(steps):
        residual = slope(matrix.times(weights[:-1]) + weights[-1])
        gradient = matrix.transposed_times(residual) + decay * weights[:-1]
        gradient = np.append(gradient, residual.sum())
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        direction = mean / (1 - 0.9 ** (step + 1))
        direction /= np.sqrt(square / (1 - 0.99 ** (step + 1))) + 1e-8
        weights = weights - _RATE * (1 - step / steps) * direction
    return weights[:-1], float(weights[-1])


def logistic(labels: Array) -> Slope:
    """Slope of the cross entropy of the labels; both classes have equal weight."""
    share = labels.mean()
    importance = np.where(labels > 0, 0.5 / share, 0.5 / (1 - share)) / len(labels)
    return lambda logits: importance * (1 / (1 + np.exp(-logits)) - labels)


def shares(logits: Array, owners: NDArray[np.int64]) -> Array:
    """Softmax over the sentences of each prompt and "none of them", whose logit is 0."""
    odds = np.exp(logits.clip(-30, 30))
    return odds / (1 + np.bincount(owners, odds))[owners]


def attention(asks: Array, owners: NDArray[np.int64]) -> Slope:
    """Slope of the cross entropy of which sentences of a prompt are its request, if any is."""
    _, owners = np.unique(owners, return_inverse=True)
    some = np.bincount(owners, asks)[owners] > 0
    count = int(owners.max()) + 1

    def slope(logits: Array) -> Array:
        share = shares(logits, owners)
        right = np.bincount(owners, share * asks)[owners]
        wanted = np.where(some, share * asks / np.maximum(right, 1e-12), 0)
        each = np.where(some, asks / np.maximum(np.bincount(owners, asks)[owners], 1), 0)
        return (share - (wanted + each) / 2) / count

    return slope


def _row(features: Iterable[str]) -> NDArray[np.uint32]:
    return np.array(hashes(features), np.uint32)


class Data:
    """Samples and the features that the classifier sees of them, sentence by sentence."""

    def __init__(self, made: Sequence[Sample]) -> None:
        self.samples = made
        self.labels = np.array([sample.localization for sample in made], np.float64)
        self.folds = np.array([sample.fold for sample in made])
        shapes = [_row(shape(sample.prompt)) for sample in made]
        wordings, standings, owners, asks = [], [], [], []
        for at, sample in enumerate(made):
            for segment in segments(sample.prompt):
                wordings.append(_row(segment.wording()))
                standings.append(np.concatenate([wordings[-1], _row(segment.standing())]))
                owners.append(at)
                asks.append(not sample.is_text(segment.start, segment.end))
        self.owners = np.array(owners, np.int64)
        self.asks = np.array(asks, np.float64)
        every = np.concatenate([np.unique(row) for row in [*standings, *shapes]])
        keys, counts = np.unique(every, return_counts=True)
        self.keys = keys[counts >= _RARE]
        self.wordings = Matrix.of(self.keys, wordings)
        self.standings = Matrix.of(self.keys, standings)
        self.shapes = Matrix.of(self.keys, shapes)

    def train(self, used: Flags, steps: int) -> HashedClassifier:
        """A classifier from the samples ``used``."""
        some = (used & (np.arange(len(used)) % 3 == 0))[self.owners]  # sentences: many, and alike
        slope = attention(self.asks[some], self.owners[some])
        asks, ask_bias = descend(self.standings.chosen(some), slope, _ASK_DECAY, steps)
        share = shares(self.standings.times(asks) + ask_bias, self.owners)
        share[share < _FAINT] = 0
        count = len(self.labels)
        said = self.wordings.pooled(self.owners, share, count)
        build = self.shapes
        both = Matrix(
            np.concatenate([said.rows, build.rows]),
            np.concatenate([said.columns, build.columns]),
            np.concatenate([said.values, build.values]),
            count,
            len(self.keys),
        )
        slope = logistic(self.labels[used])
        locates, bias = descend(both.chosen(used), slope, _TASK_DECAY, steps)
        scales = np.array([np.abs(asks).max(), np.abs(locates).max()]) / 127
        in_bytes = [
            np.rint(weights / scale).astype(np.int8)
            for weights, scale in zip((asks, locates), scales, strict=True)
        ]
        some_weight = (in_bytes[0] != 0) | (in_bytes[1] != 0)
        return HashedClassifier(
            self.keys[some_weight],
            in_bytes[0][some_weight],
            in_bytes[1][some_weight],
            scales,
            np.array([ask_bias, bias]),
        )


def train(per_kind: int, seed: int, steps: int = 100) -> HashedClassifier:
    """The classifier trained on all samples."""
    data = Data(samples(per_kind, seed, FOLDS))
    return data.train(np.ones(len(data.samples), bool), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help=f"write the weights here ({SHIPPED} ships)")
    parser.add_argument("--per-kind", type=int, default=80, help="prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    data = Data(samples(args.per_kind, args.seed, FOLDS))
    found = np.zeros(len(data.samples), bool)
    for fold in range(FOLDS):
        classifier = data.train(data.folds != fold, args.steps)
        for at in np.flatnonzero(data.folds == fold):
            found[at] = classifier.task(data.samples[int(at)].prompt) == "localization"
    actual = data.labels > 0
    in_families = np.array(["(" in sample.kind for sample in data.samples])
    for title, these in (("families", in_families), ("templates", ~in_families)):
        figures = Figures.of(found[these], actual[these])
        sys.stdout.write(f"{title} of phrasing held out: {figures}\n")
    kinds = np.array([sample.kind for sample in data.samples])
    for kind in dict.fromkeys(kinds):
        right = float((found == actual)[kinds == kind].mean())
        sys.stdout.write(f"  {kind}: {right:.3f} of {(kinds == kind).sum()}\n")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        shipped = data.train(np.ones(len(found), bool), args.steps)
        np.savez_compressed(args.out, **vars(shipped))


if __name__ == "__main__":
    main()
