"""Scores by keys alone: how similar a key is to the mean direction, or to other keys."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.score.causal_scores import PIECE_BYTES

_ROWS = 32
_SMALLEST_NORM = 1e-8


def anchor_similarity(key: Tensor, missing: Tensor | None = None) -> Tensor:
    """Cosine between each key and the mean of all keys' directions.

    key: [..., n, D]. Returns float32 [..., n]; keys ``missing [..., n]`` are ignored and get 0.
    KeyDiff, arXiv 2504.15364, section 3.
    """
    if key.dim() > 2 and 4 * key.numel() > PIECE_BYTES:
        gone = [None] * len(key) if missing is None else missing
        return torch.stack([anchor_similarity(*lane) for lane in zip(key, gone, strict=True)])
    unit = _directions(key, missing)
    anchor = _directions(unit.mean(dim=-2, keepdim=True))
    return (unit @ anchor.transpose(-1, -2)).squeeze(-1)


def redundancy(key: Tensor, threshold: float, missing: Tensor | None = None) -> Tensor:
    """How much of the other keys each key repeats; softmax, so each row adds to 1.

    key: [..., n, D]. Returns float32 [..., n]: column means of the cosine matrix with an empty
    diagonal, where every row leaves out the last column above ``threshold`` (its newest
    near-copy). A row without one leaves out column 0, which protects the first token; the released
    code does so. R-KV, arXiv 2505.24133, section 3. Rows are taken some at a time, so that the
    n x n matrix never exists. Keys ``missing [..., n]`` (the first of a row) are ignored and get 0;
    the row's first token is then the one after them.
    """
    unit = _directions(key, missing)
    length = key.shape[-2]
    column = torch.arange(length, device=key.device)
    first = None if missing is None else missing.sum(dim=-1, keepdim=True)
    total = torch.zeros(key.shape[:-1], dtype=torch.float32, device=key.device)
    for start in range(0, length, _ROWS):
        row = column[start : start + _ROWS, None]
        cosine = unit[..., start : start + _ROWS, :] @ unit.transpose(-1, -2)
        cosine.masked_fill_(column == row, 0.0)
        newest = torch.where(cosine > threshold, column, 0).amax(dim=-1, keepdim=True)
        if first is not None:
            newest = newest.maximum(first[..., None])
        total += cosine.scatter_(-1, newest, 0.0).sum(dim=-2)
    if first is None:
        return torch.softmax(total / length, dim=-1)
    mean = (total / (length - first)).masked_fill(column < first, -torch.inf)
    return torch.softmax(mean, dim=-1)


def _directions(x: Tensor, missing: Tensor | None = None) -> Tensor:
    unit = torch.nn.functional.normalize(x.float(), dim=-1, eps=_SMALLEST_NORM)
    return unit if missing is None else unit.masked_fill(missing[..., None], 0.0)
