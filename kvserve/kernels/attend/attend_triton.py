"""What ``paged_attention_triton`` launches: attention to a context, or a part of it; and the mean
over parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.quantized_entries_triton import (
    as_half,
    bfloat16_as_float,
    channels_of,
    numbers_at,
)

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def attend(
    out,
    shares,
    parts,
    sums,
    part_recent,
    q,
    keys,
    values,
    key_steps,
    value_steps,
    value_lows,
    tables,
    rows,
    last,
    firsts,
    always,
    sinks,
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
    soft_cap,
    key_log,
    value_log,
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
    WINDOW: tl.constexpr,
    ALWAYS: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    CHUNKED: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
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
    limit = tl.load(last + table * tokens + token, mask=real, other=-1).to(tl.int32) + 1
    limit = tl.minimum(limit, columns * BLOCK)

    end = tl.max(limit, axis=0)
    begin = 0
    if WINDOW:  # what no query sees is not read; tiles still begin at multiples of their width
        lower = tl.load(firsts + table * tokens + token, mask=limit > 0, other=2147483647)
        lower = lower.to(tl.int32)
        nearest = tl.minimum(tl.min(lower, axis=0), end)
        opens = nearest // TILE * TILE
        begin = opens
        if ALWAYS:  # tiles of the row's first entries stand in front, as if next to these
            upper = tl.load(always + table * tokens + token, mask=limit > 0, other=0)
            upper = upper.to(tl.int32)
            farthest = tl.max(upper, axis=0)
            begin -= tl.minimum(tl.cdiv(farthest, TILE) * TILE, opens)
        apart = begin
    share = tl.maximum(tl.cdiv(end - begin, tl.num_programs(2)), least)
    share = tl.cdiv(share, TILE) * TILE
    begin += split * share
    end = tl.minimum(begin + share, end)
    place = token * (ROWS * HEADS * GROUP) + q_head
    if SPLIT:
        place += split.to(tl.int64) * tokens * (ROWS * HEADS * GROUP)
        if (split > 0) & (begin >= end):  # most parts of rows among many
            none = tl.full([QUERIES], float("-inf"), tl.float32)
            tl.store(sums + place, none, mask=real)
            if SHARES:
                tl.store(part_recent + place, none, mask=real)
            return
    q_at = q + (token * token_stride + q_head * head_stride)[:, None]
    q_at += channels_of(DIM, KEYS)[None, :]
    queries = tl.load(q_at, mask=real[:, None], other=0.0)
    row = tl.load(rows + chunk).to(tl.int64) * ROWS + table
    row_table = tables + row * columns
    k_base, v_base = keys + head * kv_head_stride, values + head * kv_head_stride
    # Steps are 16-bit numbers, one an entry; of few bits bytes, 16 beside the tile of 16 entries.
    EACH: tl.constexpr = 16 if KEYS > 64 else 1
    PER_STEP: tl.constexpr = 1 if KEYS > 64 else 2
    beside_base = head * kv_head_stride // PER_STEP
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SHARES:
        newer = limit - tl.load(recent + token, mask=real, other=1).to(tl.int32)
        near = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    scale = tl.zeros([QUERIES], tl.float32) + scale
    if KEYS > 0:
        # Keys and values are numbers of float16, times one of each entry. Queries become such by a
        # power of two of each, and probabilities in units of the largest of values so far.
        queries, unit_of = as_half(queries)
        scale *= unit_of
        unit = 0.0
        lows = tl.zeros([QUERIES], tl.float32)
    # Logits are scaled as they are capped, else with their maximum.
    factor = scale
    if CAPPED:
        factor = tl.full([QUERIES], 1.0, tl.float32)
    # A tile lies in one block, or else each of its entries looks for its own.
    ONE_BLOCK: tl.constexpr = SLOTS == 0 and BLOCK % TILE == 0
    if SLOTS > 0:
        num_coded = tl.load(coded + row).to(tl.int32)
    # Entries held as codes, if there can be any; of those behind them, tiles that every query of a
    # chunk sees whole; the rest.
    if CHUNKED:
        whole = tl.minimum(tl.min(tl.where(real, limit, end), axis=0), end)
        whole = begin + tl.maximum(whole - begin, 0) // TILE * TILE
    FIRST: tl.constexpr = 0 if SLOTS > 0 else (1 if CHUNKED and ONE_BLOCK and not WINDOW else 2)
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
            if ALWAYS:
                start = tl.where(start < opens, start - apart, start)
            entry = start + tl.arange(0, TILE)
            if part > 0:
                if ONE_BLOCK:
                    block = tl.load(row_table + start // BLOCK).to(tl.int64)
                    inside = tl.arange(0, TILE)
                    there = (block >= 0) & (block < num_blocks)
                    known = (entry < (entry + 1 if part == 1 else stop)) & there
                    block = tl.where(there, block, 0)
                    skipped = start % BLOCK
                    k_first = k_base + block * block_stride + skipped // EACH * entry_stride
                    v_first = v_base + block * block_stride + skipped // EACH * value_stride
                    beside = block * block_stride // PER_STEP + beside_base
                    beside += place_of_step(skipped + inside, entry_stride, KEYS)
                    at = inside // EACH * entry_stride
                    v_at = inside // EACH * value_stride
                else:
                    block = tl.load(row_table + entry // BLOCK, mask=entry < stop, other=-1)
                    block = block.to(tl.int64)
                    inside = entry % BLOCK
                    known = (block >= 0) & (block < num_blocks)
                    block = tl.where(known, block, 0)
                    k_first, v_first = k_base, v_base
                    beside = block * block_stride // PER_STEP + beside_base
                    beside += place_of_step(inside, entry_stride, KEYS)
                    at = block * block_stride + inside // EACH * entry_stride
                    v_at = block * block_stride + inside // EACH * value_stride
                if ALWAYS:
                    known = known & ((entry >= nearest) | (entry < farthest))
                elif WINDOW:
                    known = known & (entry >= nearest)
                if KEYS > 0:
                    given = key_steps, beside, known, key_log
                    k, k_scale = numbers_at(
                        k_first, at, *given, DIM, KEYS, KEY_WIDTH, True, queries.dtype
                    )
                else:
                    k = tl.load(k_first + at[:, None] + dims[None, :])
            else:
                known, k, k_scale, v_at, v_scale = coded_tile(
                    entry,
                    stop,
                    row,
                    slots,
                    vectors,
                    slot_tables,
                    vector_tables,
                    turns,
                    slot_columns,
                    vector_columns,
                    num_turns,
                    num_blocks,
                    dims,
                    BLOCK,
                    DIM,
                    SLOTS,
                )
                k = k.to(queries.dtype)
            logits = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if KEYS > 0 or part == 0:
                logits *= k_scale.to(tl.float32)[None, :]
            if CAPPED:
                logits = capped(logits * scale[:, None], soft_cap)
            seen = known[None, :]  # none lies behind the last entry of any query
            if ALWAYS:
                early = entry[None, :] < upper[:, None]
                seen = seen & (early | (entry[None, :] >= lower[:, None]))
            elif WINDOW:
                seen = seen & (entry[None, :] >= lower[:, None])
            if CHUNKED and part != 1:
                seen = seen & (entry[None, :] < limit[:, None])
            logits = tl.where(seen, logits, float("-inf"))
            new_high = tl.maximum(high, tl.max(logits, axis=1) * factor)
            shift = tl.where(new_high == float("-inf"), 0.0, new_high)
            probs = tl.exp2(logits * factor[:, None] - shift[:, None])
            decay = tl.exp2(high - shift)
            total = total * decay + tl.sum(probs, axis=1)
            if SHARES:
                in_share = entry[None, :] >= newer[:, None]
                near = near * decay + tl.sum(tl.where(in_share, probs, 0.0), axis=1)
            if part > 0:
                if VALUES == 20:
                    low = bfloat16_as_float(tl.load(value_lows + beside, mask=known, other=0))
                    lows = lows * decay + tl.sum(probs * low[None, :], axis=1)
                if VALUES > 0:
                    given = value_steps, beside, known, value_log
                    v, v_scale = numbers_at(
                        v_first, v_at, *given, DIM, VALUES, VALUE_WIDTH, False, queries.dtype
                    )
                    new_unit = tl.maximum(unit, tl.max(v_scale, axis=0))
                    per_unit = 1.0 / tl.where(new_unit > 0, new_unit, 1.0)
                    probs *= (v_scale * per_unit)[None, :]
                    decay *= unit * per_unit
                    unit = new_unit
                else:
                    v_at = v_first + v_at[:, None] + dims[None, :]
                    v = tl.load(v_at, mask=known[:, None], other=0.0)
            else:
                v = tl.load(v_at + dims[None, :], mask=known[:, None], other=0.0)
                probs *= v_scale.to(tl.float32)[None, :]
            acc = acc * decay[:, None]
            acc = tl.dot(probs.to(v.dtype), v, acc, input_precision="ieee")
            high = new_high

    if VALUES > 0:
        acc = acc * unit + lows[:, None]
    if REMAINDER:
        lane_at = row * HEADS + head
        k_at, v_at = channels_of(DIM, KEYS), channels_of(DIM, VALUES)
        remainder = lane_at, split, more_keys, more_values, more_bias, soft_cap, k_at, v_at
        acc, total, high, decay = with_remainder(
            acc, total, high, queries, limit, scale, *remainder, DIM, CAPPED
        )
        if SHARES:
            near *= decay
    if SINKS:  # one more logit of each head, without a value, in the first part
        sink = tl.load(sinks + q_head, mask=real, other=0.0) * 1.4426950408889634  # log2(e)
        sink = tl.where((split == 0) & (limit > 0), sink, float("-inf"))
        new_high = tl.maximum(high, sink)
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        decay = tl.exp2(high - shift)
        total = total * decay + tl.exp2(sink - shift)
        acc *= decay[:, None]
        if SHARES:
            near *= decay
        high = new_high
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    if SPLIT:
        tl.store(sums + place, high + tl.log2(total), mask=real)
        if SHARES:
            tl.store(part_recent + place, high + tl.log2(near), mask=real)
        # A part without entries is not written, since it is never read.
        part_at = parts + place[:, None] * DIM + channels_of(DIM, VALUES)[None, :]
        tl.store(part_at, acc, mask=(real & (begin < end))[:, None])
    else:
        if SHARES:
            share = high + tl.log2(near) - high - tl.log2(total)
            share = tl.where(high == float("-inf"), 0.0, share) * 0.6931471805599453  # ln(2)
            tl.store(shares + place, share, mask=real)
        out_at = out + place[:, None] * DIM + channels_of(DIM, VALUES)[None, :]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=real[:, None])


@Helper
def place_of_step(entry, tile_stride, FORM: tl.constexpr):
    """Where the steps of a block's entries are, from its first one on."""
    if FORM > 64:
        entry = entry // 16 * tile_stride + entry % 16
    return entry


@Helper
def capped(logits, soft_cap):
    """soft_cap * tanh(x / soft_cap) of logits x in units of ln(2), as is ``soft_cap``."""
    twice = tl.minimum(tl.maximum(logits * (2.8853900817779268 / soft_cap), -60.0), 60.0)
    return soft_cap - 2.0 * soft_cap / (tl.exp2(twice) + 1.0)


@Helper
def with_remainder(
    acc,
    total,
    high,
    queries,
    limit,
    scale,
    lane,
    split,
    more_keys,
    more_values,
    more_bias,
    soft_cap,
    k_at,
    v_at,
    DIM: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The sums with a row's remainder, if it has one, in the first part; and the factor that
    earlier sums decay by. The order of a sum is free."""
    bias = tl.where(split == 0, tl.load(more_bias + lane), float("-inf"))
    more_key = tl.load(more_keys + lane * DIM + k_at).to(tl.float32)[None, :]
    more_value = tl.load(more_values + lane * DIM + v_at).to(tl.float32)[None, :]
    logit = tl.sum(queries.to(tl.float32) * more_key, axis=1) * scale
    if CAPPED:
        logit = capped(logit, soft_cap)
    begins = (limit > 0) & (tl.zeros_like(high) + bias > float("-inf"))
    logit = tl.where(begins, logit + bias * 1.4426950408889634, float("-inf"))  # log2(e)
    new_high = tl.maximum(high, logit)
    shift = tl.where(new_high == float("-inf"), 0.0, new_high)
    decay, weight = tl.exp2(high - shift), tl.exp2(logit - shift)
    total = total * decay + weight
    # Where there is none its numbers may be anything.
    acc = acc * decay[:, None] + tl.where(begins[:, None], weight[:, None] * more_value, 0.0)
    return acc, total, new_high, decay


@Helper
def coded_tile(
    entry,
    stop,
    row,
    slots,
    vectors,
    slot_tables,
    vector_tables,
    turns,
    slot_columns,
    vector_columns,
    num_turns,
    num_blocks,
    dims,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Of a tile of entries held as codes (``coded_entries.py``): which are known, their keys, where
    their values lie, and the scales of both."""
    HALF: tl.constexpr = DIM // 2
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
    return known, k, k_scale, v_at, v_scale


@Kernel
def merge(
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
    """The mean over a context's parts."""
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
