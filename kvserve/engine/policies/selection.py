"""Choosing entries by score. Ties go to the older entry, everywhere; no loop, no device sync."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_order(scores: Tensor) -> Tensor:
    """Indices by falling score along the last axis, lower index first among equals."""
    return scores.argsort(dim=-1, descending=True, stable=True)


def ranks(scores: Tensor) -> Tensor:
    """Each place's position in the ``stable_order`` of the last axis: int64, 0 for the best."""
    rank = torch.empty_like(scores, dtype=torch.int64)
    place = torch.arange(scores.shape[-1], device=scores.device)
    return rank.scatter_(-1, stable_order(scores), place.expand_as(scores))


def top_mask(scores: Tensor, count: int) -> Tensor:
    """True at the ``count`` highest scores of the last axis."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter_(-1, stable_order(scores)[..., :count], True)


def mask_to_indices(mask: Tensor, count: int) -> Tensor:
    """Ascending int64 indices of a mask with exactly ``count`` True along the last axis."""
    return stable_order(mask.to(torch.uint8))[..., :count]


def best_places(scores: Tensor, count: int, room: int = 0) -> Tensor:
    """Ascending int64 indices of the ``count`` highest scores of the last axis, with ``room`` for
    more behind them: [..., count + room]."""
    from kvserve.kernels.score.top_places import TOP_PLACES, write_top_places

    if TOP_PLACES.takes(scores, torch.float32):
        places = scores.new_empty(*scores.shape[:-1], count + room, dtype=torch.int64)
        write_top_places(scores, places, count)
        return places
    best = stable_order(scores)[..., :count].sort(dim=-1).values
    return torch.nn.functional.pad(best, (0, room))


def token_to_chunk(scores: Tensor, keep: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """Kara's Token2Chunk: ``keep`` indices, single tokens first, then the text between them.

    scores: float32 [..., n]. The ``keep - chunk_budget`` best tokens are chosen singly (Eq. 5);
    gaps of at most ``max_chunk - 2`` tokens between neighbours among them compete by
    ``R = (A_left + A_right) * gap`` (Eqs. 6-8) for ``floor(chunk_budget / (max_chunk - 2))``
    places; what the chosen gaps leave of the budget goes to the best tokens still outside, so
    exactly ``keep`` remain. Returns ascending int64 [..., keep].
    """
    if scores.is_cuda:
        from kvserve.kernels.score.token_to_chunk_triton import MOST_SCORES, token_to_chunk_triton

        if scores.shape[-1] <= MOST_SCORES:
            return token_to_chunk_triton(scores, keep, chunk_budget, max_chunk)
    return token_to_chunk_torch(scores, keep, chunk_budget, max_chunk)


def token_to_chunk_torch(scores: Tensor, keep: int, chunk_budget: int, max_chunk: int) -> Tensor:
    """The reference of ``token_to_chunk``, by sorting."""
    singles = keep - chunk_budget
    num_chunks = chunk_budget // (max_chunk - 2)
    if num_chunks == 0 or singles < 2:
        return best_places(scores, keep)
    selected = top_mask(scores, singles)
    index = mask_to_indices(selected, singles)
    ends = scores.gather(-1, index)
    distance = index[..., 1:] - index[..., :-1]
    worth = (ends[..., 1:] + ends[..., :-1]) * (distance - 1)
    eligible = (distance > 1) & (distance < max_chunk)
    worth = worth.masked_fill(~eligible, -torch.inf)
    chosen = top_mask(worth, min(num_chunks, singles - 1)) & eligible
    chosen = torch.nn.functional.pad(chosen, (0, 1))  # nothing follows the last chosen token
    segment = selected.cumsum(-1) - 1
    inside = chosen.gather(-1, segment.clamp(min=0)) & (segment >= 0)
    ranked = scores.masked_fill(selected | inside, torch.inf)
    return mask_to_indices(top_mask(ranked, keep), keep)


def best_and_newest(scores: Tensor, length: int, keep: int) -> Tensor:
    """``keep`` of ``length`` places: every unscored one, and the best of the scored ones.

    scores: float32 [..., n], of the first n places. Returns ascending int64 [..., keep], whose last
    ``length - n`` are the unscored ones.
    """
    scored = scores.shape[-1]
    kept = best_places(scores, keep - (length - scored), length - scored)
    kept[..., keep - (length - scored) :] = torch.arange(scored, length, device=scores.device)
    return kept


def uneven_best_and_newest(scores: Tensor, length: int, counts: Tensor) -> Tensor:
    """As ``best_and_newest``, with ``counts [...]`` kept places instead of equally many.

    Returns int64 [..., length], of which the first ``counts`` are kept and ascend. Counts include
    the unscored newest places and must not exceed the places that exist.
    """
    scored = scores.shape[-1]
    kept = ranks(scores) < (counts - (length - scored))[..., None]
    kept = torch.nn.functional.pad(kept, (0, length - scored), value=True)
    return stable_order(kept.to(torch.uint8))


def uneven_chunks_and_newest(
    scores: Tensor, length: int, chunk_size: int, chunks: Tensor
) -> tuple[Tensor, Tensor]:
    """The best ``chunks [...]`` whole chunks of ``chunk_size`` places, and every unscored place.

    scores: float32 [..., n], equal inside each chunk; the last chunk may be short. Returns indices
    int64 [..., length] and counts, as ``uneven_best_and_newest`` takes and gives them.
    """
    scored = scores.shape[-1]
    chosen = ranks(scores[..., ::chunk_size]) < chunks[..., None]
    kept = chosen.repeat_interleave(chunk_size, dim=-1)[..., :scored]
    kept = torch.nn.functional.pad(kept, (0, length - scored), value=True)
    return stable_order(kept.to(torch.uint8)), kept.sum(dim=-1)


def chunks_and_newest(
    scores: Tensor, length: int, keep: int, chunk_size: int, chunk_reduce: str
) -> Tensor:
    """As ``best_and_newest`` with whole chunks of ``chunk_size`` places, from place 0 on.

    Chunks rank by the sum (or mean) of their scores; the last may be short. They are taken by rank
    while they fit, then the first places of the next one fill up (ChunkKV, arXiv 2502.00299,
    Algorithm 1, with an exact budget). Returns ascending int64 [..., keep].
    """
    scored = scores.shape[-1]
    chunks = -(-scored // chunk_size)
    padded = torch.nn.functional.pad(scores, (0, chunks * chunk_size - scored))
    worth = padded.reshape(*scores.shape[:-1], chunks, chunk_size).sum(dim=-1)
    first = torch.arange(chunks, device=scores.device) * chunk_size
    size = (scored - first).clamp(max=chunk_size)
    if chunk_reduce == "mean":
        worth = worth / size
    order = stable_order(worth)
    sizes = size.expand_as(worth).gather(-1, order)
    room = keep - (length - scored) - (sizes.cumsum(-1) - sizes)
    taken = torch.empty_like(order).scatter_(-1, order, room)
    place = torch.arange(length, device=scores.device)
    chunk = (place // chunk_size).clamp(max=chunks - 1)
    kept = (place - first[chunk] < taken[..., chunk]) | (place >= scored)
    return mask_to_indices(kept, keep)
