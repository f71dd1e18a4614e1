"""Window scores on a GPU: logarithms of the sums, then the scores, in two passes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels import dispatch
from kvserve.kernels.checks import AGGREGATES, GROUP_AGGREGATES, check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel, Tile, tile_of
from kvserve.kernels.score.causal_scores import Queries
from kvserve.kernels.score.seen import Given, Seen
from kvserve.kernels.score.window_scores import five_dims
from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.int4_log_triton import widened

if TYPE_CHECKING:
    import triton.language as tl

LOGARITHM = "logarithm"
"""The logarithm of the sum over all queries of a group, for ``log_given_triton`` alone."""


def window_scores_triton(
    query: Queries,
    key: Tensor,
    scale: float,
    aggregate: str = "sum",
    group_aggregate: str = "mean",
    seen: Seen | None = None,
    beside: Given | None = None,
) -> Tensor:
    """Two passes that hold no [W, n] matrix: each query's log-sum-exp, then each key's share.

    The query is of the keys' type, or float32, or e4m3 on sm_89 and newer, or as logged in 4 bits.
    """
    _check(query, key, aggregate, group_aggregate, seen)
    *lead, heads, window, _ = query.shape
    kv_heads, held, _ = key.shape[-3:]
    length = held if seen is None else held - seen.later
    launch = _Launch.of(query, key, scale)
    sums = torch.empty(launch.programs, heads, window, dtype=torch.float32, device=key.device)
    if seen is not None:
        sums.copy_(seen.shares.reshape(sums.shape))
    out = torch.empty(*lead, kv_heads, length, dtype=torch.float32, device=key.device)
    if not length:
        return out
    launch.log_sums(sums, held, seen)
    launch.shares(out, sums, length, aggregate, group_aggregate)
    if beside is not None:
        torch.mul(sums.view_as(beside.log_sums), math.log(2), out=beside.log_sums)
        launch.shares(beside.keys, sums, length, "sum", "mean")
        beside.keys.mul_(heads // kv_heads)
    return out


def log_given_triton(query: Queries, key: Tensor, log_sums: Tensor, scale: float) -> Tensor:
    """The logarithm of what a group's queries give each key: float32 [..., Hkv, n].

    Of the sum of exp(q . k - log_sum); log_sums: float32 [..., Hq, W].
    """
    launch = _Launch.of(query, key, scale)
    out = torch.empty(key.shape[:-1], dtype=torch.float32, device=key.device)
    sums = log_sums.mul(math.log2(math.e)).view(launch.programs, *log_sums.shape[-2:])
    launch.shares(out, sums, key.shape[-2], LOGARITHM, "mean")
    return out.mul_(math.log(2))


@dataclass(frozen=True, slots=True)
class _Launch:
    """What both kernels are given for the same queries and keys; ``programs`` events and layers."""

    programs: int
    shared: tuple[object, ...]
    key_strides: tuple[int, ...]
    options: dict[str, Any]
    tile: Tile

    @classmethod
    def of(cls, query: Queries, key: Tensor, scale: float) -> _Launch:
        numbers = query if isinstance(query, Tensor) else query.codes
        q, k = five_dims(numbers), five_dims(key)
        exact = torch.float32 in (q.dtype, k.dtype)
        tile = tile_of("scores", q.device, key.shape[-1], torch.float32 if exact else k.dtype)
        heads, window = query.shape[-3:-1]
        programs, inner = q.shape[0] * q.shape[1], q.shape[1]
        scales = _scales(query, programs, heads, window)
        shared = (q, scales, k, scale * math.log2(math.e), window, inner, *q.stride()[:4])
        options = {
            "HEADS": key.shape[-3],
            "GROUP": heads // key.shape[-3],
            "DIM": key.shape[-1],
            "ROWS": tile.rows,
            "TILE": tile.columns,
            "INT4": not isinstance(query, Tensor),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        return cls(programs, shared, k.stride()[:4], options, tile)

    def log_sums(self, sums: Tensor, held: int, seen: Seen | None) -> None:
        """Fill ``sums`` [programs, Hq, W], in bits; with ``seen`` they hold shares before."""
        grid = self.programs * sums.shape[1], -(-sums.shape[2] // self.tile.rows)
        places = (0, 0, 1) if seen is None else (seen.first, seen.step, seen.span)
        arguments = sums, *self.shared, *self.key_strides, held, *places
        _log_sums.launch(grid, *arguments, ABSOLUTE=seen is not None, **self.options)

    def shares(
        self, out: Tensor, sums: Tensor, length: int, aggregate: str, group_aggregate: str
    ) -> None:
        """Fill ``out`` [..., Hkv, length] with what queries of these log-sums give each key."""
        grid = self.programs * self.options["HEADS"], -(-length // self.tile.columns)
        _shares.launch(
            grid,
            *(out, sums, *self.shared, *self.key_strides, length),
            AGGREGATE=(*AGGREGATES, LOGARITHM).index(aggregate),
            POOL=GROUP_AGGREGATES.index(group_aggregate),
            **self.options,
        )


def _scales(query: Queries, programs: int, heads: int, window: int) -> Tensor:
    """float16 [programs, Hq, W] of queries in 4 bits; for others, a tensor that is not read."""
    if isinstance(query, Tensor):
        return query
    return query.scales[..., 0].reshape(programs, heads, window).contiguous()


def _check(
    query: Queries, key: Tensor, aggregate: str, group_aggregate: str, seen: Seen | None
) -> None:
    check_head_dim(query if isinstance(query, Tensor) else key, key)
    for name, value, allowed in (
        ("aggregate", aggregate, AGGREGATES),
        ("group_aggregate", group_aggregate, GROUP_AGGREGATES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
    q, k = query.shape, key.shape
    if q[:-3] != k[:-3] or q[-3] % k[-3] or q[-1] != k[-1]:
        raise ValueError(f"query {list(q)} does not go with key {list(k)}")
    if seen is not None:
        fits = seen.shares.shape == q[:-1] and 0 <= seen.later <= k[-2]
        last = seen.first + seen.step * (q[-2] - 1)
        if not fits or seen.first < 0 or min(seen.step, seen.span) < 1 or last >= k[-2]:
            raise ValueError(
                f"shares {list(seen.shares.shape)} from place {seen.first} by {seen.step}, span "
                f"{seen.span} and {seen.later} later keys do not go with query {list(q)} and key "
                f"{list(k)}"
            )
    if isinstance(query, Int4Queries):
        if query.codes.stride(-1) != 1:
            raise ValueError(f"codes have to be contiguous, strides {list(query.codes.stride())}")
        return
    if query.dtype not in (key.dtype, torch.float32, torch.float8_e4m3fn):
        raise ValueError(f"query is {query.dtype}, key is {key.dtype}")
    if query.dtype is torch.float8_e4m3fn and dispatch.capability(query.device) < (8, 9):
        raise ValueError(
            "a query log of e4m3 numbers needs sm_89 or newer; log in the model's type"
        )


@Helper
def _queries_at(at, stride, row, window, DIM: tl.constexpr, INT4: tl.constexpr):
    """Queries ``row`` of those at ``at``: [ROWS, DIM], numbers or what was logged in 4 bits."""
    # One return: Triton compiles what follows a return, and wants one type.
    if INT4:
        pairs = tl.arange(0, DIM // 2)[None, :]
        codes_at = at + (row.to(tl.int64) * stride)[:, None] + pairs
        queries = widened(tl.load(codes_at, mask=(row < window)[:, None], other=0x88))
    else:
        dims = tl.arange(0, DIM)[None, :]
        q_at = at + (row.to(tl.int64) * stride)[:, None] + dims
        queries = tl.load(q_at, mask=(row < window)[:, None], other=0.0)
    return queries


@Helper
def _keys_at(at, stride, place, length, DIM: tl.constexpr):
    """Keys ``place`` of those at ``at``: [TILE, DIM]."""
    k_at = at + (place.to(tl.int64) * stride)[:, None] + tl.arange(0, DIM)[None, :]
    return tl.load(k_at, mask=(place < length)[:, None], other=0.0)


@Kernel
def _log_sums(
    sums,
    q,
    scales,
    k,
    scale,
    window,
    inner,
    q_stride_0,
    q_stride_1,
    q_stride_head,
    q_stride_row,
    k_stride_0,
    k_stride_1,
    k_stride_head,
    k_stride_row,
    length,
    first,
    step,
    span,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    INT4: tl.constexpr,
    ABSOLUTE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    event, head = lane // (HEADS * GROUP), lane % (HEADS * GROUP)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    q_base = q + event // inner * q_stride_0 + event % inner * q_stride_1 + head * q_stride_head
    queries = _queries_at(q_base, q_stride_row, row, window, DIM, INT4)
    if q.dtype.element_ty != tl.float32:
        queries = queries.to(k.dtype.element_ty)
    factor = tl.full([ROWS], scale, tl.float32)
    if INT4:
        factor *= tl.load(scales + lane * window + row, mask=row < window, other=0.0).to(tl.float32)
    k_base = k + event // inner * k_stride_0 + event % inner * k_stride_1
    k_base += head // GROUP * k_stride_head
    high = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if ABSOLUTE:
        own = first + step * row
        begin = own // span * span
        later = tl.zeros([ROWS], tl.float32)
        recent = tl.zeros([ROWS], tl.float32)
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        keys = _keys_at(k_base, k_stride_row, place, length, DIM).to(queries.dtype)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * factor[:, None]
        logits = tl.where(place[None, :] < length, logits, float("-inf"))
        new_high = tl.maximum(high, tl.max(logits, axis=1))
        decay = tl.exp2(high - new_high)
        powers = tl.exp2(logits - new_high[:, None])
        total = total * decay + tl.sum(powers, axis=1)
        if ABSOLUTE:
            since = place[None, :] > own[:, None]
            later = later * decay + tl.sum(tl.where(since, powers, 0.0), axis=1)
            shared = (place[None, :] >= begin[:, None]) & (place[None, :] <= own[:, None])
            recent = recent * decay + tl.sum(tl.where(shared, powers, 0.0), axis=1)
        high = new_high
    if ABSOLUTE:
        share = tl.load(sums + lane * window + row, mask=row < window, other=0.0)
        # A query with hardly any share does not vote; exp(80) is far from infinite.
        total = tl.maximum(total, later + recent * tl.exp(tl.minimum(-share, 80.0)))
    tl.store(sums + lane * window + row, high + tl.log2(total), mask=row < window)


@Kernel
def _shares(
    out,
    sums,
    q,
    scales,
    k,
    scale,
    window,
    inner,
    q_stride_0,
    q_stride_1,
    q_stride_head,
    q_stride_row,
    k_stride_0,
    k_stride_1,
    k_stride_head,
    k_stride_row,
    length,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    INT4: tl.constexpr,
    AGGREGATE: tl.constexpr,
    POOL: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    event, head = lane // HEADS, lane % HEADS
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k_base = k + event // inner * k_stride_0 + event % inner * k_stride_1 + head * k_stride_head
    keys = _keys_at(k_base, k_stride_row, place, length, DIM)
    if q.dtype.element_ty == tl.float32:
        keys = keys.to(tl.float32)
    q_base = q + event // inner * q_stride_0 + event % inner * q_stride_1
    pooled = tl.zeros([TILE], tl.float32)
    high = tl.full([TILE], float("-inf"), tl.float32)
    for member in range(0, GROUP):
        q_head = q_base + (head * GROUP + member) * q_stride_head
        head_rows = (lane * GROUP + member) * window
        share = tl.zeros([TILE], tl.float32)
        for start in range(0, window, ROWS):
            row = start + tl.arange(0, ROWS)
            queries = _queries_at(q_head, q_stride_row, row, window, DIM, INT4).to(keys.dtype)
            logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
            if INT4:
                factor = tl.load(scales + head_rows + row, mask=row < window, other=0.0)
                logits *= factor.to(tl.float32)[:, None]
            # Rows that do not exist take no part: exp2(-inf) is 0.
            log_sum = tl.load(sums + head_rows + row, mask=row < window, other=float("inf"))
            logits -= log_sum[:, None]
            if AGGREGATE == 3:  # logits of rows that do not exist are -inf; some row does exist
                new_high = tl.maximum(high, tl.max(logits, axis=0))
                pooled = pooled * tl.exp2(high - new_high)
                pooled += tl.sum(tl.exp2(logits - new_high[None, :]), axis=0)
                high = new_high
            probs = tl.exp2(logits)
            if AGGREGATE == 0:
                share += tl.sum(probs, axis=0)
            elif AGGREGATE == 1:
                share += tl.sum(probs * probs, axis=0)
            elif AGGREGATE == 2:
                share = tl.maximum(share, tl.max(probs, axis=0))
        if POOL == 0:
            pooled += share
        elif POOL == 1:
            pooled = tl.maximum(pooled, share)
        else:
            pooled += share * share
    if AGGREGATE == 3:
        pooled = high + tl.log2(pooled)
    elif POOL != 1:
        pooled = pooled / GROUP
    if POOL == 2:
        pooled = tl.sqrt(pooled)
    tl.store(out + lane * length + place, pooled, mask=place < length)
