"""How much attention a window of queries pays to the keys it could cost their place."""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATES = ("sum", "sum_squares", "max")
GQA_REDUCTIONS = ("mean", "max", "sum")


def window_scores(query: Tensor, key: Tensor, scale: float, aggregate: str = "sum") -> Tensor:
    """Bidirectional softmax over the keys, aggregated over queries, averaged over query heads.

    query: [..., Hq, W, D]; key: [..., Hkv, n, D] with Hq a multiple of Hkv (query head h reads KV
    head h // (Hq/Hkv)). Returns float32 [..., Hkv, n]. Kara, arXiv 2607.01237, Eq. 4: no causal
    mask, softmax over the n compressible keys only; with ``sum`` each row of the result adds to W.
    """
    probs = torch.softmax(_logits(query, key, scale), dim=-1)
    if aggregate == "sum_squares":
        probs = probs.square()
    pooled = probs.amax(dim=-2) if aggregate == "max" else probs.sum(dim=-2)
    return pooled.mean(dim=-2)


def causal_scores(
    query: Tensor,
    key: Tensor,
    scale: float,
    gqa_reduce: str = "mean",
    missing: Tensor | None = None,
) -> Tensor:
    """Mean probability that the last W of n tokens give each earlier one, over a group's heads.

    query: [..., Hq, W, D], those of the last W keys; key: [..., Hkv, n, D]. Query i sees keys up to
    n - W + i; the softmax runs over all it sees, and the window's own columns are dropped after it.
    Keys ``missing [..., Hkv, n]`` are seen by none and get 0; the window's own are all there.
    Returns float32 [..., Hkv, n - W], or [..., Hq, n - W] with ``gqa_reduce`` ``none``. SnapKV,
    arXiv 2404.14469, section 4.
    """
    window, length = query.shape[-2], key.shape[-2]
    place = torch.arange(length, device=key.device)
    unseen = place > place[length - window :, None]
    if missing is not None:
        unseen = unseen | missing[..., None, None, :]
    probs = torch.softmax(_logits(query, key, scale).masked_fill_(unseen, -torch.inf), dim=-1)
    votes = probs[..., : length - window].mean(dim=-2)
    return votes.flatten(-3, -2) if gqa_reduce == "none" else _over_group(votes, gqa_reduce, -2)


def past_scores(
    query: Tensor,
    key: Tensor,
    scale: float,
    gqa_reduce: str = "max",
    missing: Tensor | None = None,
) -> Tensor:
    """As ``causal_scores``, but the softmax sees the n - W earlier keys alone, and it comes second.

    Logits are reduced over a group's heads first; each row of the result adds to 1. The importance
    of R-KV, arXiv 2505.24133, section 3, and its decode-time SnapKV.
    """
    past = key[..., : key.shape[-2] - query.shape[-2], :]
    logits = _over_group(_logits(query, past, scale), gqa_reduce, -3)
    if missing is not None:
        # Not -inf, which would make NaN of a lane that holds nothing but the window.
        none = missing[..., None, : past.shape[-2]]
        logits = logits.masked_fill(none, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, dim=-1).mean(dim=-2)


def received_mass(query: Tensor, key: Tensor, scale: float, block: int = 256) -> Tensor:
    """Attention each key got from the last Q queries, summed over them and over a group's heads.

    query: [..., Hq, Q, D]; key: [..., Hkv, n, D]; query i sees keys up to n - Q + i. Returns
    float32 [..., Hkv, n], each KV head adding to group * Q. Rows are taken ``block`` at a time,
    so that no [Q, n] matrix is held. H2O, arXiv 2306.14048, section 4.
    """
    length, count = key.shape[-2], query.shape[-2]
    places = torch.arange(length, device=key.device)
    mass = torch.zeros(key.shape[:-1], dtype=torch.float32, device=key.device)
    for start in range(0, count, block):
        part = query[..., start : start + block, :]
        last = length - count + start + torch.arange(part.shape[-2], device=key.device)
        logits = _logits(part, key, scale).masked_fill(places > last[:, None], -torch.inf)
        mass += torch.softmax(logits, dim=-1).sum(dim=(-3, -2))
    return mass


def _logits(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """float32 [..., Hkv, group, W, n]. A group's queries are folded, so no key is repeated."""
    kv_heads, window = key.shape[-3], query.shape[-2]
    group = query.shape[-3] // kv_heads
    folded = query.float().unflatten(-3, (kv_heads, group)).flatten(-3, -2)
    return (folded @ key.float().transpose(-1, -2) * scale).unflatten(-2, (group, window))


def _over_group(x: Tensor, reduction: str, dim: int) -> Tensor:
    if reduction == "max":
        return x.amax(dim)
    return x.sum(dim) if reduction == "sum" else x.mean(dim)
