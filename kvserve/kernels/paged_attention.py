"""Attention of new tokens over paged entries: decode, chunks, and queries that see less than all.

P chunks of consecutive tokens have R block tables each: one for all KV heads, or one for every KV
head. Each token has its own limit, so a chunk is causal where limits rise by one, and a strided
observation pass sets them as it likes. Decoding is chunks of one token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Kernel, Tile, check_head_dim, num_processors, tile_of

if TYPE_CHECKING:
    import triton.language as tl

_MAX_SPLITS = 64


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    limits: Tensor,
    scale: float,
    max_limit: int,
    starts: Tensor | None = None,
    max_chunk: int = 1,
) -> Tensor:
    """q: [T, Hq, D] -> [T, Hq, D]; a token that sees nothing gets 0.

    keys, values: [num_blocks, B, Hb, D], strided; tables: int32 [P, R, M] with Hkv = R * Hb;
    limits: int32 [R, T], how many entries of its row each token sees, at most ``max_limit``.
    starts: int32 [P + 1], the first token of every chunk of at most ``max_chunk``; ``None``: P = T
    chunks of one. Entries in blocks outside of the cache are not seen.
    """
    if q.is_cuda:
        return paged_attention_triton(
            q, keys, values, tables, limits, scale, max_limit, starts, max_chunk
        )
    return paged_attention_torch(q, keys, values, tables, limits, scale, starts)


def paged_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    limits: Tensor,
    scale: float,
    starts: Tensor | None = None,
) -> Tensor:
    """The reference, in float32: every token gathers all entries of its rows."""
    if starts is not None:
        tables = tables.repeat_interleave(starts.diff(), dim=0)
    tokens, rows, _ = tables.shape
    # [T, R, M * B, Hb, D] -> [T, R, Hb, 1, M * B, D]
    k, v = (x[tables.long()].flatten(2, 3).transpose(2, 3)[:, :, :, None] for x in (keys, values))
    folded = q.float().view(tokens, rows, k.shape[2], -1, 1, q.shape[-1])
    logits = (folded @ k.float().transpose(-1, -2) * scale).squeeze(-2)
    place = torch.arange(logits.shape[-1], device=q.device)
    seen = (place < limits.T[..., None])[:, :, None, None]
    probs = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
    # What is not seen may hold anything, and 0 * nan is nan.
    v = v.float().masked_fill(~seen[..., None], 0.0)
    return (probs[..., None, :] @ v).view(q.shape).to(q.dtype)


def paged_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    limits: Tensor,
    scale: float,
    max_limit: int,
    starts: Tensor | None = None,
    max_chunk: int = 1,
    num_splits: int | None = None,
) -> Tensor:
    """Query heads of a KV head share its loads; few long rows are split over the context.

    ``num_splits`` (default: enough for all multiprocessors) follows from shapes and ``max_limit``
    alone, so a captured graph stays valid while lengths grow up to it.
    """
    _check(q, keys, values, tables, limits, starts)
    tokens, heads, dim = q.shape
    chunks, rows, columns = tables.shape
    num_blocks, block, kv_heads, _ = keys.shape
    group = heads // (rows * kv_heads)
    packed = max_chunk * group
    tile = tile_of("decode" if packed <= 64 else "prefill", q.device, dim, q.dtype)
    if packed <= 64:
        tile = tile._replace(rows=max(tile.rows, 1 << (packed - 1).bit_length()))
    query_tiles = -(-packed // tile.rows)
    lanes = chunks * rows * kv_heads
    if num_splits is None:
        num_splits = _splits(lanes * query_tiles, max_limit, tile, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts, sums = out, limits
    if num_splits > 1:
        parts = q.new_empty(num_splits, tokens, heads, dim, dtype=torch.float32)
        sums = q.new_empty(num_splits, tokens, heads, dtype=torch.float32)
    _attend.launch(
        (lanes, query_tiles, num_splits),
        parts,
        sums,
        q,
        keys,
        values,
        tables,
        limits,
        limits if starts is None else starts,
        scale * math.log2(math.e),
        tokens,
        columns,
        num_blocks,
        *q.stride()[:2],
        *keys.stride()[:3],
        ROWS=rows,
        HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK=block,
        QUERIES=tile.rows,
        TILE=tile.columns,
        SPLIT=num_splits > 1,
        CHUNKED=starts is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if num_splits > 1:
        _merge.launch(
            (tokens * heads,),
            out,
            parts,
            sums,
            tokens * heads,
            num_splits,
            DIM=dim,
            SPAN=1 << (num_splits - 1).bit_length(),
            num_warps=4,
        )
    return out


def _splits(programs: int, max_limit: int, tile: Tile, device: torch.device) -> int:
    """A power of two: two programs for each multiprocessor, but four tiles or more for each."""
    wanted = 2 * num_processors(device) // max(1, programs)
    most = min(wanted, max_limit // (4 * tile.columns), _MAX_SPLITS)
    return 1 << (max(1, most).bit_length() - 1)


def _check(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    limits: Tensor,
    starts: Tensor | None,
) -> None:
    check_head_dim(q, keys, values)
    chunks, rows, _ = tables.shape
    if keys.shape != values.shape or keys.stride() != values.stride():
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} differ")
    if len({x.dtype for x in (q, keys, values)}) > 1:
        raise ValueError(f"q is {q.dtype}, keys are {keys.dtype} and values are {values.dtype}")
    if q.shape[1] % (rows * keys.shape[2]):
        raise ValueError(f"q {list(q.shape)} has no whole group for {rows} * {keys.shape[2]} heads")
    if limits.shape != (rows, q.shape[0]) or not limits.is_contiguous():
        raise ValueError(f"limits [{rows}, {q.shape[0]}] expected, got {list(limits.shape)}")
    if not tables.is_contiguous() or chunks != (q.shape[0] if starts is None else len(starts) - 1):
        raise ValueError(f"tables {list(tables.shape)} do not go with q {list(q.shape)}")


@Kernel
def _attend(
    out,
    sums,
    q,
    keys,
    values,
    tables,
    limits,
    starts,
    scale,
    tokens,
    columns,
    num_blocks,
    token_stride,
    head_stride,
    block_stride,
    entry_stride,
    kv_head_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    lane, split = tl.program_id(0), tl.program_id(2)
    row, head = lane // HEADS, lane % HEADS
    chunk, table = row // ROWS, row % ROWS
    first, length = chunk, 1
    if CHUNKED:
        first = tl.load(starts + chunk)
        length = tl.load(starts + chunk + 1) - first
    # The query heads of a KV head lie side by side, token after token: no group is padded.
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    real = query < length * GROUP
    token = (first + query // GROUP).to(tl.int64)
    q_head = (table * HEADS + head) * GROUP + query % GROUP
    dims = tl.arange(0, DIM)
    q_at = q + (token * token_stride + q_head * head_stride)[:, None] + dims[None, :]
    queries = tl.load(q_at, mask=real[:, None], other=0.0)
    limit = tl.load(limits + table * tokens + token, mask=real, other=0)
    limit = tl.minimum(limit, columns * BLOCK)

    end = tl.max(limit, axis=0)
    share = tl.cdiv(tl.cdiv(end, TILE), tl.num_programs(2)) * TILE
    begin = split * share
    end = tl.minimum(begin + share, end)
    row_table = tables + row.to(tl.int64) * columns
    k_base = keys + head * kv_head_stride + dims[None, :]
    v_base = values + head * kv_head_stride + dims[None, :]
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    for start in range(begin, end, TILE):
        entry = start + tl.arange(0, TILE)
        block = tl.load(row_table + entry // BLOCK, mask=entry < end, other=-1).to(tl.int64)
        known = (block >= 0) & (block < num_blocks)
        at = (block * block_stride + entry % BLOCK * entry_stride)[:, None]
        k = tl.load(k_base + at, mask=known[:, None], other=0.0)
        logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        seen = (entry[None, :] < limit[:, None]) & known[None, :]
        logits = tl.where(seen, logits, float("-inf"))
        new_high = tl.maximum(high, tl.max(logits, axis=1))
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        probs = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(high - shift)
        total = total * decay + tl.sum(probs, axis=1)
        v = tl.load(v_base + at, mask=known[:, None], other=0.0)
        acc = acc * decay[:, None]
        acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
        high = new_high

    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    place = token * (ROWS * HEADS * GROUP) + q_head
    if SPLIT:
        place += split.to(tl.int64) * tokens * (ROWS * HEADS * GROUP)
        tl.store(sums + place, high + tl.log2(total), mask=real)
    out_at = out + place[:, None] * DIM + dims[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[:, None])


@Kernel
def _merge(
    out,
    parts,
    sums,
    places,
    splits,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, SPAN), tl.arange(0, DIM)
    at = part.to(tl.int64) * places + place
    log_sum = tl.load(sums + at, mask=part < splits, other=float("-inf"))
    high = tl.max(log_sum, axis=0)
    weight = tl.exp2(log_sum - tl.where(high == float("-inf"), 0.0, high))
    part_at = parts + at[:, None] * DIM + dims[None, :]
    rows = tl.load(part_at, mask=(part < splits)[:, None], other=0.0)
    total = tl.sum(weight, axis=0)
    mean = tl.sum(rows * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, mean.to(out.dtype.element_ty))
