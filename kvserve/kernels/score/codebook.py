"""Codebooks of directions: SpindleKV's replacement of keys and values by references.

A stream is the vectors of one layer, KV head and kind (keys before RoPE, or values). Every vector
is replaced by an entry whose cosine with it exceeds theta, scaled to the vector's length. An entry
is one of the vectors, not an average, and once made it never changes. arXiv 2507.06517, section 3.
Letters: S streams, N new vectors, M known entries, D. All arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cover:
    """Which entry stands for each vector, and which vectors became entries.

    ``ref [S, N]``: numbers of entries, old ones first (-1: no vector is there). ``centres [S, N]``:
    the vectors that became entries, in order, of which ``counts [S]`` exist. int64.
    """

    ref: Tensor
    centres: Tensor
    counts: Tensor


def greedy_cover(similar: Tensor) -> Cover:
    """Make entry after entry of the vector that covers most of those without an entry.

    similar: bool [S, N, N], symmetric; a vector that is not there is False on the diagonal.
    On ties the first is taken. A vector refers to the first entry that covers it, which need not be
    the nearest. SpindleKV, Algorithm 1, with degrees maintained: each vector's row is subtracted
    once.
    """
    streams, length, _ = similar.shape
    place = torch.arange(length, device=similar.device)
    stream = torch.arange(streams, device=similar.device)
    alive = similar.diagonal(dim1=1, dim2=2).clone()
    degree = similar.sum(dim=-1)
    ref = torch.full_like(degree, -1)
    centres, counts = torch.zeros_like(degree), torch.zeros_like(stream)
    while (alive & (degree > 1)).any():
        # Unique numbers, since argmax does not promise the first of equals.
        first = torch.where(alive, degree * length + (length - 1 - place), -1).argmax(dim=-1)
        covered = similar[stream, first] & alive
        ref = torch.where(covered, counts[:, None], ref)
        centres[stream, counts.clamp(max=length - 1)] = first
        counts += covered.any(dim=-1)
        alive &= ~covered
        at, gone = covered.nonzero(as_tuple=True)
        degree.index_add_(0, at, -similar[at, gone].long())
    # The others resemble no other vector, and are taken in order.
    order = (~alive).to(torch.uint8).argsort(dim=-1, stable=True)
    number = torch.empty_like(order).scatter_(-1, order, counts[:, None] + place)
    behind = place >= counts[:, None]
    shifted = order.gather(-1, (place - counts[:, None]).clamp(min=0))
    return Cover(
        torch.where(alive, number, ref),
        torch.where(behind, shifted, centres),
        counts + alive.sum(dim=-1),
    )


def directions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths [..., 1] of x [..., D]; a vector of length 0 has direction 0."""
    x = x.float()
    length = x.norm(dim=-1, keepdim=True)
    return torch.where(length > 0, x / length, 0.0), length


def build(x: Tensor, there: Tensor, theta: Tensor) -> Cover:
    """A new codebook of x [S, N, D], of which ``there [S, N]`` exist; theta [S]."""
    unit, _ = directions(x)
    similar = unit @ unit.transpose(-1, -2) > theta[:, None, None]
    # Vectors of length 0, and rounding, could make it false.
    similar.diagonal(dim1=1, dim2=2).fill_(True)
    return greedy_cover(similar & there[:, None] & there[..., None])


def match(x: Tensor, entries: Tensor, known: Tensor, theta: Tensor) -> Tensor:
    """The nearest entry of each vector if its cosine exceeds theta, else -1: int64 [S, N].

    x: [S, N, D]; entries: [S, M, D], of which ``known [S, M]`` count; theta: [S]. On ties, the
    first.
    """
    if not entries.shape[1]:
        return torch.full(x.shape[:2], -1, device=x.device)
    cosine = directions(x)[0] @ directions(entries)[0].transpose(-1, -2)
    cosine = cosine.masked_fill(~known[:, None], -torch.inf)
    best = cosine.amax(dim=-1, keepdim=True)
    number = torch.arange(entries.shape[1], device=x.device)
    nearest = torch.where(cosine == best, number, entries.shape[1]).amin(dim=-1)
    return torch.where(best[..., 0] > theta[:, None], nearest, -1)


def extend(
    x: Tensor,
    there: Tensor,
    entries: Tensor,
    known: Tensor,
    theta: Tensor,
    numbers_from: Tensor,
    tile: int = 2048,
) -> Cover:
    """Match new vectors with the known entries; vectors without a match are covered greedily.

    Shapes as in ``build`` and ``match``; new entries are numbered from ``numbers_from [S]`` on.
    Vectors are taken ``tile`` at a time, so that no [N, N] matrix is held; later ones are matched
    with entries of earlier tiles too, which makes a few more entries and keeps all guarantees.
    """
    (streams, length), old = x.shape[:2], entries.shape[1]
    ref = torch.full((streams, length), -1, device=x.device)
    centres, counts = torch.zeros_like(ref), torch.zeros_like(numbers_from)
    for start in range(0, length, tile):
        some, place = slice(start, start + tile), torch.arange(start, device=x.device)
        begun = x.gather(1, centres[:, :start, None].expand(-1, -1, x.shape[-1]))
        both = torch.cat([entries, begun], dim=1)
        alive = torch.cat([known, place < counts[:, None]], dim=1)
        found = match(x[:, some], both, alive, theta)
        found = torch.where(found >= old, found - old + numbers_from[:, None], found)
        found = torch.where(there[:, some], found, -1)
        new = build(x[:, some], there[:, some] & (found < 0), theta)
        number = new.ref + (numbers_from + counts)[:, None]
        ref[:, some] = torch.where(new.ref >= 0, number, found)
        made = torch.arange(new.ref.shape[1], device=x.device) < new.counts[:, None]
        stream, at = made.nonzero(as_tuple=True)
        centres[stream, counts[stream] + at] = new.centres[stream, at] + start
        counts = counts + new.counts
    return Cover(ref, centres, counts)


def scales(x: Tensor, entries: Tensor) -> Tensor:
    """What each entry [..., D] is multiplied by to have the length of x [..., D]: float32 [...].

    Exactly 1 where they are the same vector.
    """
    own, its = x.float().norm(dim=-1), entries.float().norm(dim=-1)
    return torch.where(own == its, 1.0, own / its)
