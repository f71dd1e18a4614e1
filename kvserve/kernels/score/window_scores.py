"""How much attention a window of queries pays to the keys that an event may evict."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled
from kvserve.kernels.checks import AGGREGATES, GROUP_AGGREGATES, runs_triton
from kvserve.kernels.score.causal_scores import Queries, logits_of, over_group
from kvserve.kernels.score.seen import Given, Seen
from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.quantized_entries import LevelKeys
from kvserve.late import Late

COMPILED = Compiled("window_scores")
window_scores_triton: Callable[..., Tensor] = Late(
    "kernels.score.window_scores_triton:window_scores_triton"
)


def window_scores(
    query: Queries,
    key: Tensor | LevelKeys,
    scale: float,
    aggregate: str = "sum",
    group_aggregate: str = "mean",
    seen: Seen | None = None,
    beside: Given | None = None,
) -> Tensor:
    """Bidirectional softmax over the keys, aggregated over queries, then over query heads.

    query: [..., Hq, W, D]; key: [..., Hkv, n, D] with Hq a multiple of Hkv (query head h reads KV
    head h // (Hq/Hkv)). Returns float32 [..., Hkv, n]. Kara, arXiv 2607.01237, Eq. 4: no causal
    mask, softmax over the n compressible keys only; with ``sum`` each row of the result adds to W.

    With ``seen`` attention is absolute: the softmax of a query runs over all that it had seen, and
    over those of the n + later keys that came after it; key: [..., Hkv, n + later, D]. What it gave
    to keys that are not here follows from its share and the keys that the share is of. The
    probabilities of a query are bounded to add to at most 1: rounded queries, and keys evicted
    since, could make it more. ``beside`` is filled, if it is given.
    """
    how = scale, aggregate, group_aggregate, seen, beside
    levels = key[0] if isinstance(key, LevelKeys) else key
    if runs_triton(levels):
        return window_scores_triton(query, key, *how)
    if isinstance(query, Int4Queries) and takes(COMPILED, query, levels):
        return window_scores_cpu(query, key, *how)
    return window_scores_torch(query, key if levels is key else key.float(), *how)


def window_scores_torch(
    query: Queries,
    key: Tensor,
    scale: float,
    aggregate: str = "sum",
    group_aggregate: str = "mean",
    seen: Seen | None = None,
    beside: Given | None = None,
) -> Tensor:
    """The reference of ``window_scores``, which holds all [W, n] logits."""
    probs = window_probs(query, key, scale, seen)
    if beside is not None:
        beside.log_sums.copy_(window_log_sums(query, key, scale, seen))
        beside.keys.copy_(probs.sum(dim=(-3, -2)))
    if aggregate == "sum_squares":
        probs = probs.square()
    pooled = probs.amax(dim=-2) if aggregate == "max" else probs.sum(dim=-2)
    return over_group(pooled, group_aggregate, -2)


def takes(compiled: Compiled, query: Int4Queries, *keys: Tensor) -> bool:
    """Whether a compiled kernel takes these queries and keys, or values."""
    alike = len({x.dtype for x in keys}) == 1 and query.codes.stride(-1) == 1
    types = torch.float32, torch.bfloat16, torch.int8
    return alike and all(compiled.takes(x, *types, multiple=8) for x in keys)


def window_scores_cpu(
    query: Int4Queries,
    key: Tensor | LevelKeys,
    scale: float,
    aggregate: str = "sum",
    group_aggregate: str = "mean",
    seen: Seen | None = None,
    beside: Given | None = None,
) -> Tensor:
    """For queries that are logged in 4 bits; holds the logits of some queries at a time."""
    *lead, heads, window, _ = query.shape
    kv_heads, held, dim = key.shape[-3:]
    length = held if seen is None else held - seen.later
    numbers, steps = key if isinstance(key, LevelKeys) else (key, None)
    codes, keys = five_dims(query.codes), five_dims(numbers)
    scales = query.scales[..., 0].float().mul_(scale).contiguous()
    shares = None if seen is None else seen.shares.float().contiguous()
    out = torch.empty(*lead, kv_heads, length)
    COMPILED(
        *(codes, scales, shares, keys, None if steps is None else steps.contiguous()),
        *(out, *(beside or (None, None))),
        *(codes.stride()[:4], keys.stride()[:4]),
        *(*keys.shape[:2], heads, kv_heads, window, length, held - length, dim),
        *((0, 1, 1) if seen is None else (seen.first, seen.step, seen.span)),
        *(AGGREGATES.index(aggregate), GROUP_AGGREGATES.index(group_aggregate)),
        *(keys.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return out


def five_dims(x: Tensor) -> Tensor:
    """[..., heads, S, D] with two leading dimensions; a view, unless there are more."""
    while x.dim() < 5:
        x = x[None]
    return x.flatten(0, -5)


def window_probs(query: Queries, key: Tensor, scale: float, seen: Seen | None = None) -> Tensor:
    """What each query gives each of the n keys: float32 [..., Hkv, group, W, n]."""
    logits = logits_of(query, key, scale)
    total = _log_sums_of(logits, seen)
    later = 0 if seen is None else seen.later
    return torch.exp(logits[..., : logits.shape[-1] - later] - total[..., None])


def window_log_sums(query: Queries, key: Tensor, scale: float, seen: Seen | None = None) -> Tensor:
    """The logarithm of what each query's softmax divides by: float32 [..., Hq, W]."""
    return _log_sums_of(logits_of(query, key, scale), seen).flatten(-3, -2)


def _log_sums_of(logits: Tensor, seen: Seen | None) -> Tensor:
    """logits: [..., Hkv, group, W, n + later] -> [..., Hkv, group, W]."""
    if seen is None:
        return logits.logsumexp(dim=-1)
    group, window, length = logits.shape[-3:]
    place = torch.arange(length, device=logits.device)
    own = (seen.first + seen.step * torch.arange(window, device=logits.device))[:, None]
    later, recent = place > own, (place <= own) & (place >= own // seen.span * seen.span)
    since, shared = (
        logits.masked_fill(~there, -torch.inf).logsumexp(dim=-1) for there in (later, recent)
    )
    total = torch.logaddexp(shared - seen.shares.unflatten(-2, (-1, group)), since)
    return total.maximum(logits.logsumexp(dim=-1))
