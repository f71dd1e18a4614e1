"""How much attention a window's queries pay to the keys they could evict (Kara, Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

AGGREGATES = ("sum", "sum_squares", "max")


def window_scores(query: Tensor, key: Tensor, scale: float, aggregate: str = "sum") -> Tensor:
    """Bidirectional softmax over the keys, aggregated over queries, averaged over query heads.

    query: [..., Hq, W, D]; key: [..., Hkv, n, D] with Hq a multiple of Hkv (query head h reads KV
    head h // (Hq/Hkv)). Returns float32 [..., Hkv, n]. Kara, arXiv 2607.01237, Eq. 4: no causal
    mask, softmax over the n compressible keys only; with ``sum`` each row of the result adds to W.
    """
    kv_heads, group = key.shape[-3], query.shape[-3] // key.shape[-3]
    query = query.float().unflatten(-3, (kv_heads, group))
    logits = query @ key.float().unsqueeze(-3).transpose(-1, -2) * scale
    probs = torch.softmax(logits, dim=-1)  # [..., Hkv, group, W, n]
    if aggregate == "sum_squares":
        probs = probs.square()
    pooled = probs.amax(dim=-2) if aggregate == "max" else probs.sum(dim=-2)
    return pooled.mean(dim=-2)
