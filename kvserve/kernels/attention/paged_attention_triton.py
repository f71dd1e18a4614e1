"""Attention of new tokens over paged entries: decode, chunks, and queries that see less than all.

P chunks of consecutive tokens have R block tables each: one for all KV heads, or one for every KV
head. Each token has a last entry that it sees: in a causal chunk these rise by one, and a strided
observation pass may set any. Decoding is chunks of one token. The first entries of a table may be
held as codes (``coded_entries.py``): they are decoded tile by tile.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_attention
from kvserve.kernels.coded_entries import Codes
from kvserve.kernels.dispatch import Kernel, Tile, num_processors, tile_of
from kvserve.kernels.quantized_entries import QuantizedVectors
from kvserve.kernels.quantized_triton import (
    as_half,
    bfloat16_as_float,
    form_of,
    levels_as_floats,
    parts_of,
)
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares

if TYPE_CHECKING:
    import triton.language as tl

    from kvserve.kernels.tiles import Tile

_MAX_SPLITS = 64
_MAX_LONG_SPLITS = 4  # most of these parts have no entries


def paged_attention_triton(
    q: Tensor,
    keys: Tensor | QuantizedVectors,
    values: Tensor | QuantizedVectors,
    tables: Tensor,
    chunks: QuerySegments,
    scale: float,
    num_splits: int | None = None,
    codes: Codes | None = None,
    shares: Shares | None = None,
    remainder: Remainder | None = None,
) -> Tensor:
    """As ``paged_attention_torch``; entries in blocks outside of the cache are not seen, and
    neither are codes with wrong references.

    Levels are widened as they are loaded; scales of keys multiply the logits instead. Query heads
    of a KV head share its loads. The context is split if there are few rows, and for long rows
    among many. ``num_splits`` (default: from ``_splits``) follows from shapes and ``max_held``
    alone, so a captured graph stays valid while lengths grow up to it.
    """
    check_attention(q, keys, values, tables, chunks, codes, shares, remainder)
    rows, last, max_held, starts, max_chunk = chunks
    tokens, heads, dim = q.shape
    _, per_row, columns = tables.shape
    num_blocks, block, kv_heads, _ = keys.shape
    group = heads // (per_row * kv_heads)
    packed = max_chunk * group
    # Decoding codes takes registers, so these kernels have tiles of their own.
    kernel = ("decode" if packed <= 64 else "prefill") + " codes" * (codes is not None)
    tile = tile_of(kernel, q.device, dim, q.dtype)
    if packed <= 64:
        queries = max(tile.rows, 1 << (packed - 1).bit_length())
        tile = tile._replace(rows=queries, warps=max(tile.warps, min(4, queries // 8)))
    elif form_of(values) == 2:  # both halves of a value are added up apart, which takes registers
        tile = tile._replace(rows=tile.rows // 2)
    query_tiles = -(-packed // tile.rows)
    lanes = len(rows) * per_row * kv_heads
    least = 1
    if num_splits is None:
        num_splits, least = _splits(lanes * query_tiles, max_held, tile, q.device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Without shares nothing is read or written there: any address does.
    given, recent = (last, rows) if shares is None else shares
    parts, sums, part_recent = out, last, given
    if num_splits > 1:
        parts = q.new_empty(num_splits, tokens, heads, dim, dtype=torch.float32)
        sums = q.new_empty(num_splits, tokens, heads, dtype=torch.float32)
        if shares is not None:
            part_recent = torch.empty_like(sums)
    _attend.launch(
        (lanes, query_tiles, num_splits),
        parts,
        sums,
        part_recent,
        q,
        *_entry_arguments(keys, values, tables),
        tables,
        rows,
        last,
        rows if starts is None else starts,
        recent,
        *((tables,) * 3 if remainder is None else remainder),
        *_code_arguments(codes, tables),
        scale * math.log2(math.e),
        tokens,
        least,
        columns,
        num_blocks,
        *q.stride()[:2],
        *_entry_strides(keys, values),
        ROWS=per_row,
        HEADS=kv_heads,
        GROUP=group,
        DIM=dim,
        BLOCK=block,
        QUERIES=tile.rows,
        TILE=tile.columns,
        SPLIT=num_splits > 1,
        SHARES=shares is not None,
        REMAINDER=remainder is not None,
        CHUNKED=starts is not None,
        SLOTS=0 if codes is None else codes.slots.shape[1],
        KEYS=form_of(keys),
        VALUES=form_of(values),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if num_splits > 1:
        _merge.launch(
            (tokens * heads,),
            out,
            parts,
            sums,
            part_recent,
            given,
            tokens * heads,
            num_splits,
            DIM=dim,
            SPAN=1 << (num_splits - 1).bit_length(),
            SHARES=shares is not None,
            num_warps=4,
        )
    return out


def _entry_arguments(
    keys: Tensor | QuantizedVectors, values: Tensor | QuantizedVectors, unused: Tensor
) -> tuple[Tensor, ...]:
    """Keys, values, and the scales and lows of their levels."""
    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        assert isinstance(keys, Tensor) and isinstance(values, Tensor)
        return keys, values, unused, unused, unused
    (k, k_scale, _), (v, *beside) = parts_of(keys), parts_of(values)
    return k, v, k_scale, *beside


def _entry_strides(
    keys: Tensor | QuantizedVectors, values: Tensor | QuantizedVectors
) -> tuple[int, ...]:
    """Strides of blocks, entries and KV heads, and of the values' entries."""
    k, v = (x if isinstance(x, Tensor) else x.levels for x in (keys, values))
    return *k.stride()[:3], v.stride(1)


def _code_arguments(codes: Codes | None, unused: Tensor) -> tuple[Tensor | int, ...]:
    """What the kernel reads of codes; a slot is four words of 32 bits there."""
    if codes is None:
        return *[unused] * 6, 0, 0, 0
    slots, vectors, coded, slot_tables, vector_tables, turns = codes
    widths = slot_tables.shape[2], vector_tables.shape[2], len(turns)
    return slots.view(torch.int32), vectors, coded, slot_tables, vector_tables, turns, *widths


def _splits(programs: int, max_held: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Parts of a context, and the fewest entries of a part.

    Few rows are split until every multiprocessor has ``tile.programs``, into parts of four tiles or
    more. If there are enough rows, only those that hold more than ``tile.longest`` are split.
    """
    fill = tile.programs * num_processors(device) // max(1, programs)
    fill = max(1, min(fill, max_held // (4 * tile.columns), _MAX_SPLITS))
    if fill > 1 or not tile.longest:
        return fill, 4 * tile.columns
    return max(1, min(-(-max_held // tile.longest), _MAX_LONG_SPLITS)), tile.longest


@Kernel
def _attend(
    out,
    sums,
    shares,
    q,
    keys,
    values,
    key_scales,
    value_scales,
    value_lows,
    tables,
    rows,
    last,
    starts,
    recent,
    more_keys,
    more_values,
    more_bias,
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
    least,
    columns,
    num_blocks,
    token_stride,
    head_stride,
    block_stride,
    entry_stride,
    kv_head_stride,
    value_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    SHARES: tl.constexpr,
    REMAINDER: tl.constexpr,
    CHUNKED: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
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
    share = tl.maximum(tl.cdiv(end, tl.num_programs(2)), least)
    share = tl.cdiv(share, TILE) * TILE
    begin = split * share
    end = tl.minimum(begin + share, end)
    row = tl.load(rows + chunk).to(tl.int64) * ROWS + table
    row_table = tables + row * columns
    k_base, v_base = keys + head * kv_head_stride, values + head * kv_head_stride
    beside_base = head * (kv_head_stride // 2)
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SHARES:
        newer = limit - tl.load(recent + token, mask=real, other=1).to(tl.int32)
        near = tl.zeros([QUERIES], tl.float32)
    # A byte of int4 holds a level of either half of a value.
    V_WIDTH: tl.constexpr = DIM // 2 if VALUES == 2 else DIM
    v_dims = tl.arange(0, V_WIDTH)[None, :]
    acc = tl.zeros([QUERIES, V_WIDTH], tl.float32)
    scale = tl.zeros([QUERIES], tl.float32) + scale
    if KEYS > 0:
        # Levels are numbers of float16. Queries become such by a power of two of each, and
        # probabilities in units of the largest scale of values so far.
        queries, unit_of = as_half(queries)
        scale *= unit_of
        unit = 0.0
    if VALUES == 2:
        upper = tl.zeros([QUERIES, V_WIDTH], tl.float32)
        lows = tl.zeros([QUERIES], tl.float32)
    # A tile lies in one block, or else each of its entries looks for its own.
    ONE_BLOCK: tl.constexpr = SLOTS == 0 and BLOCK % TILE == 0
    if SLOTS > 0:
        HALF: tl.constexpr = DIM // 2
        num_coded = tl.load(coded + row).to(tl.int32)
    # Entries held as codes, if there can be any; of those behind them, tiles that every query of a
    # chunk sees whole; the rest.
    if CHUNKED:
        whole = tl.minimum(tl.min(tl.where(real, limit, end), axis=0), end)
        whole = begin + tl.maximum(whole - begin, 0) // TILE * TILE
    FIRST: tl.constexpr = 0 if SLOTS > 0 else (1 if CHUNKED and ONE_BLOCK else 2)
    for part in tl.static_range(FIRST, 3, 2 if SLOTS > 0 else 1):
        first_entry, stop = begin, end
        if SLOTS > 0:
            if part == 0:
                stop = tl.minimum(end, num_coded)
            else:
                first_entry = tl.maximum(begin, num_coded)
        if FIRST == 1:
            if part == 1:
                stop = whole
            else:
                first_entry = whole
        for start in tl.range(first_entry, stop, TILE, num_stages=1 if part == 0 else None):
            entry = start + tl.arange(0, TILE)
            if part > 0:
                if ONE_BLOCK:
                    block = tl.load(row_table + start // BLOCK).to(tl.int64)
                    inside = tl.arange(0, TILE)
                    there = (block >= 0) & (block < num_blocks)
                    known = (entry < (entry + 1 if part == 1 else stop)) & there
                    block = tl.where(there, block, 0)
                    skipped = start % BLOCK
                    k_first = k_base + block * block_stride + skipped * entry_stride
                    v_first = v_base + block * block_stride + skipped * value_stride
                    beside = block * (block_stride // 2) + beside_base + skipped + inside
                    at = (inside * entry_stride)[:, None]
                    v_at = (inside * value_stride)[:, None]
                else:
                    block = tl.load(row_table + entry // BLOCK, mask=entry < stop, other=-1)
                    block = block.to(tl.int64)
                    inside = entry % BLOCK
                    known = (block >= 0) & (block < num_blocks)
                    block = tl.where(known, block, 0)
                    k_first, v_first = k_base, v_base
                    beside = block * (block_stride // 2) + beside_base + inside
                    at = (block * block_stride + inside * entry_stride)[:, None]
                    v_at = (block * block_stride + inside * value_stride)[:, None]
                if KEYS > 0:
                    k = levels_as_floats(tl.load(k_first + at + dims[None, :]), KEYS, 0)
                    k = k.to(queries.dtype)
                    k_scale = bfloat16_as_float(tl.load(key_scales + beside))
                else:
                    k = tl.load(k_first + at + dims[None, :])
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
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if KEYS > 0 or part == 0:
                logits *= k_scale.to(tl.float32)[None, :]
            seen = known[None, :]  # none lies behind the last entry of any query
            if CHUNKED and part != 1:
                seen = seen & (entry[None, :] < limit[:, None])
            if part == 0:
                bit = query % GROUP
                if GROUP > 32:  # all of them attend to everything
                    bit = tl.minimum(bit, 31)
                seen = seen & (((heads[None, :] >> bit[:, None]) & 1) != 0)
            logits = tl.where(seen, logits, float("-inf"))
            new_high = tl.maximum(high, tl.max(logits, axis=1) * scale)
            shift = tl.where(new_high == float("-inf"), 0.0, new_high)
            probs = tl.exp2(logits * scale[:, None] - shift[:, None])
            decay = tl.exp2(high - shift)
            total = total * decay + tl.sum(probs, axis=1)
            if SHARES:
                in_share = entry[None, :] >= newer[:, None]
                near = near * decay + tl.sum(tl.where(in_share, probs, 0.0), axis=1)
            if part > 0:
                if VALUES > 0:
                    if VALUES == 3:  # the only levels that may be nan
                        v = tl.load(v_first + v_at + v_dims, mask=known[:, None], other=0)
                    else:
                        v = tl.load(v_first + v_at + v_dims)
                    if VALUES == 2:
                        v_low = tl.load(value_lows + beside, mask=known, other=0)
                        v_low = bfloat16_as_float(v_low)[None, :]
                        lows = lows * decay + tl.sum(probs * v_low, axis=1)
                    v_scale = bfloat16_as_float(tl.load(value_scales + beside, mask=known, other=0))
                    new_unit = tl.maximum(unit, tl.max(v_scale, axis=0))
                    per_unit = 1.0 / tl.where(new_unit > 0, new_unit, 1.0)
                    probs *= (v_scale * per_unit)[None, :]
                    decay *= unit * per_unit
                    unit = new_unit
                else:
                    v = tl.load(v_first + v_at + v_dims, mask=known[:, None], other=0.0)
            else:
                v = tl.load(v_at + dims[None, :], mask=known[:, None], other=0.0)
                probs *= v_scale.to(tl.float32)[None, :]
            acc = acc * decay[:, None]
            if part > 0 and VALUES > 0:
                probs = probs.to(queries.dtype)
                if VALUES == 2:
                    v_upper = levels_as_floats(v, VALUES, 1).to(queries.dtype)
                    upper = upper * decay[:, None]
                    upper = tl.dot(probs, v_upper, upper, input_precision="ieee")
                v = levels_as_floats(v, VALUES, 0).to(queries.dtype)
            acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
            high = new_high

    if VALUES == 2:
        acc = tl.join(acc, upper).permute(0, 2, 1).reshape(QUERIES, DIM)
        acc = acc * unit + lows[:, None]
    elif VALUES > 0:
        acc *= unit
    if REMAINDER:  # of the first part, if the row has one; the order of a sum is free
        lane_at = row * HEADS + head
        bias = tl.where(split == 0, tl.load(more_bias + lane_at), float("-inf"))
        more_key = tl.load(more_keys + lane_at * DIM + dims).to(tl.float32)[None, :]
        more_value = tl.load(more_values + lane_at * DIM + dims).to(tl.float32)[None, :]
        logit = tl.sum(queries.to(tl.float32) * more_key, axis=1) * scale
        begins = (limit > 0) & (tl.zeros_like(high) + bias > float("-inf"))
        logit = tl.where(begins, logit + bias * 1.4426950408889634, float("-inf"))  # log2(e)
        new_high = tl.maximum(high, logit)
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        decay, weight = tl.exp2(high - shift), tl.exp2(logit - shift)
        total = total * decay + weight
        if SHARES:
            near *= decay
        # Where there is none its numbers may be anything.
        acc = acc * decay[:, None] + tl.where(begins[:, None], weight[:, None] * more_value, 0.0)
        high = new_high
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    place = token * (ROWS * HEADS * GROUP) + q_head
    if SPLIT:
        place += split.to(tl.int64) * tokens * (ROWS * HEADS * GROUP)
        tl.store(sums + place, high + tl.log2(total), mask=real)
    if SHARES:
        share = high + tl.log2(near)
        if not SPLIT:
            share = tl.where(high == float("-inf"), 0.0, share - high - tl.log2(total))
            share *= 0.6931471805599453  # ln(2)
        tl.store(shares + place, share, mask=real)
    out_at = out + place[:, None] * DIM + dims[None, :]
    if SPLIT:  # a part without entries is not written, since it is never read
        real = real & (begin < end)
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[:, None])


@Kernel
def _merge(
    out,
    parts,
    sums,
    part_recent,
    shares,
    places,
    splits,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    SHARES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part, dims = tl.arange(0, SPAN), tl.arange(0, DIM)
    at = part.to(tl.int64) * places + place
    log_sum = tl.load(sums + at, mask=part < splits, other=float("-inf"))
    high = tl.max(log_sum, axis=0)
    base = tl.where(high == float("-inf"), 0.0, high)
    weight = tl.exp2(log_sum - base)
    part_at = parts + at[:, None] * DIM + dims[None, :]
    means = tl.load(part_at, mask=(log_sum > float("-inf"))[:, None], other=0.0)
    total = tl.sum(weight, axis=0)
    if SHARES:
        recent = tl.load(part_recent + at, mask=part < splits, other=float("-inf"))
        share = tl.log2(tl.sum(tl.exp2(recent - base), axis=0)) - tl.log2(total)
        tl.store(shares + place, tl.where(total > 0, share * 0.6931471805599453, 0.0))  # ln(2)
    mean = tl.sum(means * weight[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, mean.to(out.dtype.element_ty))
