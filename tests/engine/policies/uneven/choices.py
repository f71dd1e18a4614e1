"""What the tests of uneven policies share: choices as lists."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, Selection

Places = list[list[list[int]]]


def places(selection: Selection, event: int = 0) -> Places:
    """Kept places of each layer and head; checks that they ascend."""
    indices, counts = selection.indices[event].tolist(), selection.counts[event].tolist()
    kept = [
        [row[:count] for row, count in zip(heads, ns, strict=True)]
        for heads, ns in zip(indices, counts, strict=True)
    ]
    assert all(row == sorted(set(row)) for heads in kept for row in heads)
    return kept


def choose(policy: Policy, scores: Tensor, length: int, keep: int) -> Places:
    """For scores [L, H, n] of one event."""
    return places(policy.choose(scores[None], length, keep))


def best(scores: list[float], count: int, length: int) -> list[int]:
    """The ``count`` best places, the first of equals first, and those without a score."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return sorted(order[:count]) + list(range(len(scores), length))


def tied(*shape: int, seed: int) -> Tensor:
    """Random scores, most of them equal to some other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, shape, generator=generator) / 16
