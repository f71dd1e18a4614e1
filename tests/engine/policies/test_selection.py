"""Token2Chunk: worked examples, brute force on random scores, and its invariants."""

from __future__ import annotations

import pytest
import torch

from kvserve.engine.policies.selection import (
    best_and_newest,
    best_places,
    chunks_and_newest,
    stable_order,
    token_to_chunk,
)
from kvserve.kernels.score.top_places import TOP_PLACES
from tests.engine.policies.one_row import best

EXAMPLE = [9, 0.1, 0.2, 8, 7, 3, 0.5, 0.6, 0.7, 6, 0.05, 5, 0.25, 4, 0.15, 0.3]


def brute_force(scores: list[float], keep: int, alpha: int, gamma: int) -> list[int]:
    """Kara sections 2.2-2.3, one loop at a time."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    chosen = sorted(order[: keep - alpha])
    num_chunks = alpha // (gamma - 2)
    candidates = []
    for k in range(len(chosen) - 1):
        left, right = chosen[k], chosen[k + 1]
        gap = right - left - 1
        if gap >= 1 and right - left < gamma:
            worth = (torch.tensor(scores[left]) + torch.tensor(scores[right])) * gap
            candidates.append((-float(worth), k))
    kept = set(chosen)
    for _, k in sorted(candidates)[:num_chunks]:
        kept |= set(range(chosen[k] + 1, chosen[k + 1]))
    for j in order:
        if len(kept) == keep:
            break
        kept.add(j)
    return sorted(kept)


@pytest.mark.parametrize(
    ("alpha", "gamma", "kept"),
    [
        (4, 4, [0, 1, 2, 3, 4, 5, 9, 10, 11, 13]),
        (5, 5, [0, 1, 2, 3, 4, 5, 7, 8, 9, 11, 13]),
        (3, 3, [0, 3, 4, 5, 9, 10, 11, 12, 13]),
        (3, 6, [0, 3, 4, 5, 7, 8, 9, 11, 13]),
    ],
)
def test_worked_examples(alpha: int, gamma: int, kept: list[int]) -> None:
    scores = torch.tensor(EXAMPLE)
    assert token_to_chunk(scores, 6 + alpha, alpha, gamma).tolist() == kept


def test_against_brute_force() -> None:
    """2,000 random cases, many with ties, in batches of equal shape."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        n = int(torch.randint(1, 40, (), generator=generator))
        keep = int(torch.randint(1, n + 1, (), generator=generator))
        alpha = int(torch.randint(0, keep, (), generator=generator))
        gamma = int(torch.randint(3, 12, (), generator=generator))
        scores = torch.randint(0, 9, (4, 5, n), generator=generator).float() / 8
        got = token_to_chunk(scores, keep, alpha, gamma)
        for row, one in zip(scores.view(20, n).tolist(), got.view(20, keep).tolist(), strict=True):
            assert one == brute_force(row, keep, alpha, gamma), (row, keep, alpha, gamma)


def naive_chunks(scores: list[float], length: int, keep: int, size: int, reduce: str) -> list[int]:
    """ChunkKV with an exact budget: whole chunks by rank, then the front of the next one."""
    chunks = [range(at, min(at + size, len(scores))) for at in range(0, len(scores), size)]
    worth = [sum(scores[j] for j in chunk) for chunk in chunks]
    if reduce == "mean":
        worth = [one / len(chunk) for one, chunk in zip(worth, chunks, strict=True)]
    room = keep - (length - len(scores))
    kept = list(range(len(scores), length))
    for i in sorted(range(len(chunks)), key=lambda i: (-worth[i], i)):
        kept += list(chunks[i])[:room]
        room = max(room - len(chunks[i]), 0)
    return sorted(kept)


def test_whole_rows_against_brute_force() -> None:
    """Random scores with many ties, in batches of equal shape, with and without a window."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(150):
        scored, window, size = draw(1, 40), draw(0, 6), draw(1, 12)
        length, keep = scored + window, window + draw(1, scored + 1)
        scores = torch.randint(0, 9, (2, 2, 5, scored), generator=generator).float() / 8
        singles = best_and_newest(scores, length, keep).view(20, keep).tolist()
        for row, one in zip(scores.view(20, scored).tolist(), singles, strict=True):
            assert one == best(row, keep - window, length)
        for reduce in ("sum", "mean"):
            chunks = chunks_and_newest(scores, length, keep, size, reduce).view(20, keep).tolist()
            for row, one in zip(scores.view(20, scored).tolist(), chunks, strict=True):
                assert one == naive_chunks(row, length, keep, size, reduce), (row, keep, size)


@pytest.mark.compiler
@pytest.mark.parametrize("length", [1, 7, 300])
def test_compiled_selection_is_that_of_a_stable_sort(length: int) -> None:
    """Ties, zeros of both signs and infinities, at every count."""
    generator = torch.Generator().manual_seed(length)
    scores = torch.randint(-3, 4, (6, length), generator=generator).float()
    scores[1] = torch.randn(length, generator=generator)
    scores[2] = torch.where(scores[2] > 0, 0.0, -0.0)
    scores[3] = torch.where(scores[3] > 0, torch.inf, -torch.inf)
    scores[4] = -torch.inf
    scores[5] = torch.where(scores[5] > 1, torch.nan, scores[5])
    assert TOP_PLACES.takes(scores, torch.float32)
    for count in {1, 2, length // 2, length} & set(range(1, length + 1)):
        expected = stable_order(scores)[..., :count].sort(dim=-1).values
        assert torch.equal(best_places(scores, count), expected)
        assert torch.equal(best_places(scores, count, 3)[..., :count], expected)
