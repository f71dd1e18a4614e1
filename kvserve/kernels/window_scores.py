"""How much attention a window of queries pays to the keys it could cost their place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels import dispatch
from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Kernel, tile_of

if TYPE_CHECKING:
    import triton.language as tl

AGGREGATES = ("sum", "sum_squares", "max")
GQA_REDUCTIONS = ("mean", "max", "sum")


def window_scores(query: Tensor, key: Tensor, scale: float, aggregate: str = "sum") -> Tensor:
    """Bidirectional softmax over the keys, aggregated over queries, averaged over query heads.

    query: [..., Hq, W, D]; key: [..., Hkv, n, D] with Hq a multiple of Hkv (query head h reads KV
    head h // (Hq/Hkv)). Returns float32 [..., Hkv, n]. Kara, arXiv 2607.01237, Eq. 4: no causal
    mask, softmax over the n compressible keys only; with ``sum`` each row of the result adds to W.
    """
    if query.is_cuda:
        return window_scores_triton(query, key, scale, aggregate)
    return window_scores_torch(query, key, scale, aggregate)


def window_scores_torch(query: Tensor, key: Tensor, scale: float, aggregate: str = "sum") -> Tensor:
    """The reference of ``window_scores``, which holds all [W, n] logits."""
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


def received_mass(
    query: Tensor,
    key: Tensor,
    scale: float,
    weights: Tensor | None = None,
    missing: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """Attention each key got from the last Q queries, summed over them and over a group's heads.

    query: [..., Hq, Q, D]; key: [..., Hkv, n, D]; query i sees keys up to n - Q + i, those
    ``missing [..., Hkv, n]`` aside, and counts ``weights [Q]`` times. Returns float32
    [..., Hkv, n], each KV head adding to group * Q. Rows are taken ``block`` at a time, so that no
    [Q, n] matrix is held. H2O, arXiv 2306.14048, section 4.
    """
    length, count = key.shape[-2], query.shape[-2]
    places = torch.arange(length, device=key.device)
    mass = torch.zeros(key.shape[:-1], dtype=torch.float32, device=key.device)
    for start in range(0, count, block):
        part = query[..., start : start + block, :]
        last = length - count + start + torch.arange(part.shape[-2], device=key.device)
        unseen = places > last[:, None]
        if missing is not None:
            unseen = unseen | missing[..., None, None, :]
        probs = torch.softmax(_logits(part, key, scale).masked_fill(unseen, -torch.inf), dim=-1)
        if weights is not None:
            probs *= weights[start : start + block, None]
        mass += probs.sum(dim=(-3, -2))
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


def window_scores_triton(
    query: Tensor, key: Tensor, scale: float, aggregate: str = "sum"
) -> Tensor:
    """Two passes that hold no [W, n] matrix: each query's log-sum-exp, then each key's share.

    The query is of the keys' type, or float32, or e4m3 on sm_89 and newer.
    """
    _check(query, key, aggregate)
    *lead, heads, window, dim = query.shape
    kv_heads, length = key.shape[-3:-1]
    q, k = _five_dims(query), _five_dims(key)
    exact = torch.float32 in (q.dtype, k.dtype)
    tile = tile_of("scores", q.device, dim, torch.float32 if exact else k.dtype)
    programs, inner = q.shape[0] * q.shape[1], q.shape[1]
    sums = torch.empty(programs, heads, window, dtype=torch.float32, device=q.device)
    out = torch.empty(*lead, kv_heads, length, dtype=torch.float32, device=q.device)
    if not length:
        return out
    shared = (q, k, scale * math.log2(math.e), window, length, inner, *q.stride()[:4])
    options = {
        "HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "ROWS": tile.rows,
        "TILE": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = programs * heads, -(-window // tile.rows)
    _log_sums.launch(grid, sums, *shared, *k.stride()[:4], **options)
    grid = programs * kv_heads, -(-length // tile.columns)
    reduction = AGGREGATES.index(aggregate)
    _shares.launch(grid, out, sums, *shared, *k.stride()[:4], AGGREGATE=reduction, **options)
    return out


def _five_dims(x: Tensor) -> Tensor:
    """[..., heads, S, D] with two leading dimensions; a view, unless there are more."""
    while x.dim() < 5:
        x = x[None]
    return x.flatten(0, -5)


def _check(query: Tensor, key: Tensor, aggregate: str) -> None:
    check_head_dim(query, key)
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {AGGREGATES}, got {aggregate!r}")
    if query.shape[:-3] != key.shape[:-3] or query.shape[-3] % key.shape[-3]:
        raise ValueError(f"query {list(query.shape)} does not go with key {list(key.shape)}")
    if query.dtype not in (key.dtype, torch.float32, torch.float8_e4m3fn):
        raise ValueError(f"query is {query.dtype}, key is {key.dtype}")
    if query.dtype is torch.float8_e4m3fn and dispatch.capability(query.device) < (8, 9):
        raise ValueError(
            "a query log of e4m3 numbers needs sm_89 or newer; log in the model's type"
        )


@Kernel
def _log_sums(
    sums,
    q,
    k,
    scale,
    window,
    length,
    inner,
    q_stride_0,
    q_stride_1,
    q_stride_head,
    q_stride_row,
    k_stride_0,
    k_stride_1,
    k_stride_head,
    k_stride_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    event, head = lane // (HEADS * GROUP), lane % (HEADS * GROUP)
    dims = tl.arange(0, DIM)[None, :]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q_base = q + event // inner * q_stride_0 + event % inner * q_stride_1 + head * q_stride_head
    q_at = q_base + (row.to(tl.int64) * q_stride_row)[:, None] + dims
    queries = tl.load(q_at, mask=(row < window)[:, None], other=0.0)
    if q.dtype.element_ty != tl.float32:
        queries = queries.to(k.dtype.element_ty)
    k_base = k + event // inner * k_stride_0 + event % inner * k_stride_1
    k_base += head // GROUP * k_stride_head
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        k_at = k_base + (place.to(tl.int64) * k_stride_row)[:, None] + dims
        keys = tl.load(k_at, mask=(place < length)[:, None], other=0.0).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        logits = tl.where(place[None, :] < length, logits, float("-inf"))
        new_high = tl.maximum(high, tl.max(logits, axis=1))
        total = total * tl.exp2(high - new_high)
        total += tl.sum(tl.exp2(logits - new_high[:, None]), axis=1)
        high = new_high
    tl.store(sums + lane * window + row, high + tl.log2(total), mask=row < window)


@Kernel
def _shares(
    out,
    sums,
    q,
    k,
    scale,
    window,
    length,
    inner,
    q_stride_0,
    q_stride_1,
    q_stride_head,
    q_stride_row,
    k_stride_0,
    k_stride_1,
    k_stride_head,
    k_stride_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    AGGREGATE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    event, head = lane // HEADS, lane % HEADS
    dims = tl.arange(0, DIM)[None, :]
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k_base = k + event // inner * k_stride_0 + event % inner * k_stride_1 + head * k_stride_head
    k_at = k_base + (place.to(tl.int64) * k_stride_row)[:, None] + dims
    keys = tl.load(k_at, mask=(place < length)[:, None], other=0.0)
    if q.dtype.element_ty == tl.float32:
        keys = keys.to(tl.float32)
    q_base = q + event // inner * q_stride_0 + event % inner * q_stride_1
    mean = tl.zeros([TILE], tl.float32)
    for member in range(0, GROUP):
        q_head = q_base + (head * GROUP + member) * q_stride_head
        head_sums = sums + (lane * GROUP + member) * window
        share = tl.zeros([TILE], tl.float32)
        for start in range(0, window, ROWS):
            row = start + tl.arange(0, ROWS)
            q_at = q_head + (row.to(tl.int64) * q_stride_row)[:, None] + dims
            queries = tl.load(q_at, mask=(row < window)[:, None], other=0.0).to(keys.dtype)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            # Rows that do not exist take no part: exp2(-inf) is 0.
            log_sum = tl.load(head_sums + row, mask=row < window, other=float("inf"))
            probs = tl.exp2(logits - log_sum[:, None])
            if AGGREGATE == 0:
                share += tl.sum(probs, axis=0)
            elif AGGREGATE == 1:
                share += tl.sum(probs * probs, axis=0)
            else:
                share = tl.maximum(share, tl.max(probs, axis=0))
        mean += share
    tl.store(out + lane * length + place, mean / GROUP, mask=place < length)
