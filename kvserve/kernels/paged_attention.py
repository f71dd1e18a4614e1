"""Attention of new tokens over paged entries: decode, chunks, and queries that see less than all.

P chunks of consecutive tokens have R block tables each: one for all KV heads, or one for every KV
head. Each token has a last entry that it sees, so a chunk is causal where these rise by one, and a
strided observation pass sets them as it likes. Decoding is chunks of one token. The first entries
of a table may be held as codes (``coded_entries.py``): they are decoded tile by tile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.checks import check_attention
from kvserve.kernels.coded_entries import Codes, read_codes, read_slots
from kvserve.kernels.dispatch import Kernel, Tile, num_processors, tile_of

if TYPE_CHECKING:
    import triton.language as tl

_MAX_SPLITS = 64


class Chunks(NamedTuple):
    """P chunks of consecutive tokens, T in all; tensors of integers on the device.

    ``rows [P]`` of the block tables; token t sees entries 0 to ``last[r, t]`` (``[R, T]``, below
    ``max_held``) of table r of its row. ``starts [P + 1]`` are the first tokens of chunks of at
    most ``max_chunk``; ``None``: P = T chunks of one.
    """

    rows: Tensor
    last: Tensor
    max_held: int
    starts: Tensor | None = None
    max_chunk: int = 1


def paged_attention_torch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: Chunks,
    scale: float,
    codes: Codes | None = None,
) -> Tensor:
    """The reference, in float32: every token gathers all entries of its rows.

    q: [T, Hq, D] -> [T, Hq, D]; a token that sees nothing gets 0. keys, values: [num_blocks, B, Hb,
    D], strided; tables: int32 [num_rows, R, M] with R * Hb KV heads. Where entries are held as
    ``codes`` (Hb = 1), it does not matter which blocks the tables name for them.
    """
    rows, starts = chunks.rows, chunks.starts
    if starts is not None:
        rows = rows.repeat_interleave(starts.diff())
    own = tables[rows].long()
    tokens, per_token = own.shape[:2]
    # [T, R, M * B, Hb, D] -> [T, R, Hb, 1, M * B, D]
    k, v = (x[own].flatten(2, 3).transpose(2, 3)[:, :, :, None] for x in (keys, values))
    place = torch.arange(k.shape[4], device=q.device)
    if codes is not None:
        at = (place < codes.coded[rows][..., None]).nonzero(as_tuple=True)
        coded = codes, rows[at[0]] * per_token + at[1], at[2]
        for x, entries in zip((k, v), read_codes(*coded), strict=True):
            x[at[0], at[1], 0, 0, at[2]] = entries.to(x.dtype)
    folded = q.float().view(tokens, per_token, k.shape[2], -1, 1, q.shape[-1])
    logits = (folded @ k.float().transpose(-1, -2) * scale).squeeze(-2)
    if codes is not None:
        place_of = at[0], at[1], 0, slice(None), at[2]
        hidden = ~read_slots(*coded).seen_by(logits.shape[3])
        logits[place_of] = logits[place_of].masked_fill(hidden, -torch.inf)
    seen = (place <= chunks.last.T[..., None])[:, :, None, None]
    probs = torch.softmax(logits.masked_fill(~seen, -torch.inf), dim=-1).nan_to_num(0.0)
    # What is not seen may hold anything, and 0 * nan is nan.
    v = v.float().masked_fill(~seen[..., None], 0.0)
    return (probs[..., None, :] @ v).view(q.shape).to(q.dtype)


def paged_attention_triton(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    chunks: Chunks,
    scale: float,
    num_splits: int | None = None,
    codes: Codes | None = None,
) -> Tensor:
    """As ``paged_attention_torch``; entries in blocks outside of the cache are not seen, nor codes
    that refer to what is not there.

    Query heads of a KV head share its loads; few long rows are split over the context.
    ``num_splits`` (default: enough for all multiprocessors) follows from shapes and ``max_held``
    alone, so a captured graph stays valid while lengths grow up to it.
    """
    check_attention(q, keys, values, tables, chunks, codes)
    rows, last, max_held, starts, max_chunk = chunks
    tokens, heads, dim = q.shape
    _, per_row, columns = tables.shape
    num_blocks, block, kv_heads, _ = keys.shape
    group = heads // (per_row * kv_heads)
    packed = max_chunk * group
    tile = tile_of("decode" if packed <= 64 else "prefill", q.device, dim, q.dtype)
    if packed <= 64:
        tile = tile._replace(rows=max(tile.rows, 1 << (packed - 1).bit_length()))
    if codes is not None:
        # Decoding an entry takes registers that its tile then lacks.
        tile = tile._replace(columns=max(16, tile.columns // 2))
    query_tiles = -(-packed // tile.rows)
    lanes = len(rows) * per_row * kv_heads
    if num_splits is None:
        num_splits = _splits(lanes * query_tiles, max_held, tile, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts, sums = out, last
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
        rows,
        last,
        rows if starts is None else starts,
        *_code_arguments(codes, tables),
        scale * math.log2(math.e),
        tokens,
        columns,
        num_blocks,
        *q.stride()[:2],
        *keys.stride()[:3],
        ROWS=per_row,
        HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK=block,
        QUERIES=tile.rows,
        TILE=tile.columns,
        SPLIT=num_splits > 1,
        CHUNKED=starts is not None,
        SLOTS=0 if codes is None else codes.slots.shape[1],
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


def _code_arguments(codes: Codes | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    """What the kernel reads of codes; a slot is four words of 32 bits there."""
    if codes is None:
        return *[unused] * 6, 0, 0, 0
    slots, vectors, coded, slot_tables, vector_tables, turns = codes
    widths = slot_tables.shape[2], vector_tables.shape[2], len(turns)
    return slots.view(torch.int32), vectors, coded, slot_tables, vector_tables, turns, *widths


def _splits(programs: int, max_held: int, tile: Tile, device: torch.device) -> int:
    """A power of two: two programs for each multiprocessor, but four tiles or more for each."""
    wanted = 2 * num_processors(device) // max(1, programs)
    most = min(wanted, max_held // (4 * tile.columns), _MAX_SPLITS)
    return 1 << (max(1, most).bit_length() - 1)


@Kernel
def _attend(
    out,
    sums,
    q,
    keys,
    values,
    tables,
    rows,
    last,
    starts,
    slots,
    vectors,
    coded,
    slot_tables,
    vector_tables,
    turns,
    slot_columns,
    vector_columns,
    num_turns,
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
    SLOTS: tl.constexpr,
):
    lane, split = tl.program_id(0), tl.program_id(2)
    table, head = lane // HEADS % ROWS, lane % HEADS
    chunk = lane // (HEADS * ROWS)
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
    limit = tl.load(last + table * tokens + token, mask=real, other=-1).to(tl.int32) + 1
    limit = tl.minimum(limit, columns * BLOCK)

    end = tl.max(limit, axis=0)
    share = tl.cdiv(tl.cdiv(end, TILE), tl.num_programs(2)) * TILE
    begin = split * share
    end = tl.minimum(begin + share, end)
    row = tl.load(rows + chunk).to(tl.int64) * ROWS + table
    row_table = tables + row * columns
    k_base = keys + head * kv_head_stride + dims[None, :]
    v_base = values + head * kv_head_stride + dims[None, :]
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    if SLOTS > 0:
        HALF: tl.constexpr = DIM // 2
        num_coded = tl.load(coded + row).to(tl.int32)
    # Entries held as codes, if there can be any, then those behind them.
    for raw in tl.static_range(0 if SLOTS > 0 else 1, 2):
        first_entry, stop = begin, end
        if SLOTS > 0:
            if raw:
                first_entry = tl.maximum(begin, num_coded)
            else:
                stop = tl.minimum(end, num_coded)
        for start in tl.range(first_entry, stop, TILE, num_stages=None if raw else 1):
            entry = start + tl.arange(0, TILE)
            if raw:
                block = tl.load(row_table + entry // BLOCK, mask=entry < stop, other=-1)
                block = block.to(tl.int64)
                known = (block >= 0) & (block < num_blocks)
                at = (block * block_stride + entry % BLOCK * entry_stride)[:, None]
                k = tl.load(k_base + at, mask=known[:, None], other=0.0)
            else:
                block = tl.load(
                    slot_tables + row * slot_columns + entry // SLOTS,
                    mask=(entry < stop) & (entry // SLOTS < slot_columns),
                    other=-1,
                ).to(tl.int64)
                known = (block >= 0) & (block < num_blocks)
                slot = slots + (block * SLOTS + entry % SLOTS) * 4
                refs = tl.load(slot, mask=known, other=0)
                scales = tl.load(slot + 1, mask=known, other=0)
                distance = tl.load(slot + 2, mask=known, other=0) >> 16
                heads = tl.load(slot + 3, mask=known, other=0)
                k_ref, v_ref = refs & 0xFFFF, (refs >> 16) & 0xFFFF
                k_scale = (scales & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
                v_scale = (scales >> 16).to(tl.int16).to(tl.float16, bitcast=True)
                known = known & (tl.abs(distance) < num_turns)
                k_column, v_column = k_ref // (2 * BLOCK), v_ref // (2 * BLOCK)
                row_vectors = vector_tables + row * vector_columns
                k_block = tl.load(
                    row_vectors + k_column, mask=known & (k_column < vector_columns), other=-1
                ).to(tl.int64)
                v_block = tl.load(
                    row_vectors + v_column, mask=known & (v_column < vector_columns), other=-1
                ).to(tl.int64)
                known = known & (k_block >= 0) & (k_block < num_blocks)
                known = known & (v_block >= 0) & (v_block < num_blocks)
                k_at = vectors + ((k_block * 2 * BLOCK + k_ref % (2 * BLOCK)) * DIM)[:, None]
                v_at = vectors + ((v_block * 2 * BLOCK + v_ref % (2 * BLOCK)) * DIM)[:, None]
                turn_at = turns + (tl.abs(distance) * DIM)[:, None] + (dims % HALF)[None, :]
                cos = tl.load(turn_at, mask=known[:, None], other=0.0)
                sin = tl.load(turn_at + HALF, mask=known[:, None], other=0.0)
                negative = (distance < 0)[:, None] != (dims < HALF)[None, :]
                own = tl.load(k_at + dims[None, :], mask=known[:, None], other=0.0)
                pair_at = k_at + ((dims + HALF) % DIM)[None, :]
                pair = tl.load(pair_at, mask=known[:, None], other=0.0)
                k = own * cos + pair * tl.where(negative, -sin, sin)
                k = k.to(queries.dtype)
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
            if not raw:
                logits *= k_scale.to(tl.float32)[None, :]
            seen = (entry[None, :] < limit[:, None]) & known[None, :]
            if not raw:
                bit = query % GROUP
                if GROUP > 32:  # all of them attend to everything
                    bit = tl.minimum(bit, 31)
                seen = seen & (((heads[None, :] >> bit[:, None]) & 1) != 0)
            logits = tl.where(seen, logits, float("-inf"))
            new_high = tl.maximum(high, tl.max(logits, axis=1))
            shift = tl.where(new_high == float("-inf"), 0.0, new_high)
            probs = tl.exp2(logits - shift[:, None])
            decay = tl.exp2(high - shift)
            total = total * decay + tl.sum(probs, axis=1)
            if raw:
                v = tl.load(v_base + at, mask=known[:, None], other=0.0)
            else:
                v = tl.load(v_at + dims[None, :], mask=known[:, None], other=0.0)
                probs *= v_scale.to(tl.float32)[None, :]
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
    means = tl.load(part_at, mask=(part < splits)[:, None], other=0.0)
    total = tl.sum(weight, axis=0)
    mean = tl.sum(means * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, mean.to(out.dtype.element_ty))
