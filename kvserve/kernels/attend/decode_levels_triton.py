"""Attention of one token to entries held as levels: what ``paged_attention_triton`` launches.

- A program is one warp, so nothing is exchanged between warps.
- Entries are the rows of both products, and the queries of a KV head their columns.
- Levels of keys are multiplied as whole numbers, on tensor cores: a query is rounded to 16 bits
  once and is two bytes in two columns. Steps are applied to the products.
- Levels of values become numbers of float16 two at a time, in the registers that tensor cores read:
  bits of few are such numbers as they are, wherever they stand in a half of a word; what that
  multiplies them by is taken off at the end. Probabilities are in units of the largest step so far.
- Row r of a tile is entry r % (TILE / 4) * 4 + r // (TILE / 4): a lane has the rows of four entries
  that stand together, whose steps, codes or bytes come in one word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvserve.kernels.attend.attend_triton import capped
from kvserve.kernels.attend.levels_triton import (
    products,
    query_operand,
    value_channels,
    value_operand,
)
from kvserve.kernels.dispatch import Helper, Kernel

if TYPE_CHECKING:
    import triton.language as tl


@Kernel
def decode_levels(
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
    recent,
    more_keys,
    more_values,
    more_bias,
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
    kv_head_stride,
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
    KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    lane, split = tl.program_id(0), tl.program_id(2)
    table, head = lane // HEADS % ROWS, lane % HEADS
    token = (lane // (HEADS * ROWS)).to(tl.int64)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    real = query < GROUP
    q_head = (table * HEADS + head) * GROUP + query
    place = token * (ROWS * HEADS * GROUP) + q_head
    q += token * token_stride + (table * HEADS + head) * GROUP * head_stride
    operand, total_of, unit_of = query_operand(
        q, head_stride, query, DIM, GROUP, KEYS, KEY_WIDTH, QUERIES
    )
    factor = unit_of * scale

    end = tl.minimum(tl.load(last + table * tokens + token).to(tl.int32) + 1, columns * BLOCK)
    held = end
    begin = 0
    if WINDOW:
        lower = tl.load(firsts + table * tokens + token).to(tl.int32)
        opens = tl.minimum(lower, end) // TILE * TILE
        begin = opens
        if ALWAYS:  # tiles of the row's first entries stand in front, as if next to these
            upper = tl.load(always + table * tokens + token).to(tl.int32)
            begin -= tl.minimum(tl.cdiv(upper, TILE) * TILE, opens)
        apart = begin
    share = tl.maximum(tl.cdiv(end - begin, tl.num_programs(2)), least)
    share = tl.cdiv(share, TILE) * TILE
    begin += split * share
    end = tl.minimum(begin + share, end)
    if SPLIT:
        apart_by = split.to(tl.int64) * tokens * (ROWS * HEADS * GROUP)
        if (split > 0) & (begin >= end):  # most parts of rows among many
            none = tl.full([QUERIES], float("-inf"), tl.float32)
            tl.store(sums + apart_by + place, none, mask=real)
            if SHARES:
                tl.store(part_recent + apart_by + place, none, mask=real)
            return
    row = tl.load(rows + token).to(tl.int64) * ROWS + table
    row_table = tables + row * columns

    QUARTER: tl.constexpr = TILE // 4
    number = tl.arange(0, TILE)
    own = number % QUARTER * 4 + number // QUARTER
    high = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([TILE, QUERIES], tl.float32)
    if SHARES:
        newer = held - tl.load(recent + token).to(tl.int32)
        near = tl.zeros([TILE, QUERIES], tl.float32)
    beside = tl.zeros([TILE, QUERIES], tl.float32)
    unit = 1e-30  # a lower bound of the largest step of values so far
    WIDE: tl.constexpr = max(QUERIES, 8)
    acc = tl.zeros([VALUE_ROWS, WIDE], tl.float32)

    for start in tl.range(begin, end, TILE):
        if ALWAYS:
            start = tl.where(start < opens, start - apart, start)
        block = tl.load(row_table + start // BLOCK).to(tl.int64)
        there = (block >= 0) & (block < num_blocks)
        base = tl.where(there, block, 0) * block_stride + head * kv_head_stride
        skipped = start % BLOCK
        entry = start + own
        known = (entry < end) & there
        if ALWAYS:
            known = known & ((entry >= lower) | (entry < upper))
        elif WINDOW:
            known = known & (entry >= lower)
        # From here on addresses differ by constants.
        k = keys + (base + first_of(skipped, STRIDE, DIM, KEYS))
        v = values + (base + first_of(skipped, STRIDE, DIM, VALUES))
        at = base + skipped // 16 * STRIDE if KEYS > 64 else base // 2 + skipped
        s = products(k, operand, total_of, DIM, TILE, STRIDE, KEYS, KEY_WIDTH, ASM)
        s *= steps_of(key_steps + at, key_log, TILE, STRIDE, KEYS)[:, None] * factor[None, :]
        if CAPPED:
            s = capped(s, soft_cap)
        s = tl.where(known[:, None], s, float("-inf"))
        new = tl.maximum(high, tl.max(s, axis=0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - shift[None, :])
        decay = tl.exp2(high - shift)
        high = new
        total = total * decay[None, :] + p
        if SHARES:
            near = near * decay[None, :] + tl.where((entry >= newer)[:, None], p, 0.0)

        # What is not known may have steps that are not numbers.
        step = tl.where(known, steps_of(value_steps + at, value_log, TILE, STRIDE, VALUES), 0.0)
        new_unit = tl.maximum(unit, tl.max(step, axis=0))
        per_unit = 1.0 / new_unit
        fade = decay * (unit * per_unit)
        unit = new_unit
        small = (p * (step * per_unit)[:, None]).to(tl.float16)
        if VALUES == 20:
            low = tl.where(known, steps_of(value_lows + at, value_log, TILE, STRIDE, VALUES), 0.0)
            beside = beside * decay[None, :] + p * low[:, None]
        elif VALUES != 40:
            beside = beside * fade[None, :] + small.to(tl.float32)
        # In the order of the entries of ``value_operand``.
        small = small.reshape(2, 2, QUARTER, QUERIES).permute(1, 2, 0, 3).reshape(TILE, QUERIES)
        if QUERIES < WIDE:
            small = tl.join(small, tl.zeros_like(small)).reshape(TILE, WIDE)
        v = value_operand(v, DIM, TILE, STRIDE, VALUES, VALUE_WIDTH)
        acc = tl.dot(v, small, acc * wide(fade, WIDE)[None, :])

    channel, times, offset = value_channels(DIM, VALUES, VALUE_WIDTH)
    weight = tl.sum(total, axis=0)
    lows = tl.sum(beside, axis=0)
    if VALUES == 20:
        acc = acc * (times * unit)[:, None] + wide(lows, WIDE)[None, :]
    else:
        acc = (acc * times[:, None] - wide(lows * offset, WIDE)[None, :]) * unit
    if SHARES:
        recently = tl.sum(near, axis=0)
    if REMAINDER:
        given = q, head_stride, query, row * HEADS + head, more_keys, more_bias, scale, soft_cap
        logit = remainder_logit(*given, DIM, GROUP, CAPPED)
        logit = tl.where((split == 0) & (held > 0), logit, float("-inf"))
        weight, high, decay, own_weight = with_one_more(weight, high, logit)
        more = tl.load(more_values + (row * HEADS + head) * DIM + channel, mask=channel < DIM)
        # Where there is none its numbers may be anything.
        more = more.to(tl.float32)[:, None] * wide(own_weight, WIDE)[None, :]
        acc = acc * wide(decay, WIDE)[None, :]
        acc += tl.where(wide(logit, WIDE)[None, :] > float("-inf"), more, 0.0)
        if SHARES:
            recently *= decay
    if SINKS:  # one more logit of each head, without a value, in the first part
        sink = tl.load(sinks + q_head, mask=real, other=0.0) * 1.4426950408889634  # log2(e)
        sink = tl.where((split == 0) & (held > 0), sink, float("-inf"))
        weight, high, decay, own_weight = with_one_more(weight, high, sink)
        acc = acc * wide(decay, WIDE)[None, :]
        if SHARES:
            recently *= decay
    weight = tl.where(weight > 0, weight, 1.0)
    acc = acc / wide(weight, WIDE)[None, :]
    column = tl.arange(0, WIDE) * QUERIES // WIDE  # its query, if it is the first of that query's
    mine = tl.arange(0, WIDE) % (WIDE // QUERIES) == 0
    column += tl.program_id(1) * QUERIES
    to = token * (ROWS * HEADS * GROUP) + (table * HEADS + head) * GROUP + column
    mine = (mine & (column < GROUP))[None, :] & (channel < DIM)[:, None]
    if SPLIT:
        tl.store(sums + apart_by + place, high + tl.log2(weight), mask=real)
        if SHARES:
            tl.store(part_recent + apart_by + place, high + tl.log2(recently), mask=real)
        # A part without entries is not written, since it is never read.
        part_at = parts + ((apart_by + to) * DIM)[None, :] + channel[:, None]
        tl.store(part_at, acc, mask=mine & (begin < end))
    else:
        if SHARES:
            given = tl.log2(recently) - tl.log2(weight)
            given = tl.where(high == float("-inf"), 0.0, given) * 0.6931471805599453  # ln(2)
            tl.store(shares + place, given, mask=real)
        out_at = out + (to * DIM)[None, :] + channel[:, None]
        tl.store(out_at, acc.to(out.dtype.element_ty), mask=mine)


@Helper
def wide(x, WIDE: tl.constexpr):
    """[N] of queries, for the columns of products: each twice where there are twice as many."""
    if x.shape[0] < WIDE:
        x = tl.join(x, x).reshape(WIDE)
    return x


@Helper
def with_one_more(weight, high, logit):
    """Sums with one more logit: the sum, the largest, what earlier sums decay by, its weight."""
    new = tl.maximum(high, logit)
    shift = tl.where(new == float("-inf"), 0.0, new)
    decay, own = tl.exp2(high - shift), tl.exp2(logit - shift)
    return weight * decay + own, new, decay, own


@Helper
def remainder_logit(
    q,
    head_stride,
    query,
    lane,
    more_keys,
    more_bias,
    scale,
    soft_cap,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Of a row's remainder, with its weight; -inf if it has none."""
    dims, bias = tl.arange(0, DIM)[None, :], tl.load(more_bias + lane)
    x = tl.load(q + query[:, None] * head_stride + dims, mask=(query < GROUP)[:, None], other=0.0)
    more = tl.load(more_keys + lane * DIM + dims).to(tl.float32)
    logit = tl.sum(x.to(tl.float32) * more, axis=1) * scale
    if CAPPED:
        logit = capped(logit, soft_cap)
    begins = tl.zeros_like(logit) + bias > float("-inf")
    return tl.where(begins, logit + bias * 1.4426950408889634, float("-inf"))  # log2(e)


@Helper
def first_of(skipped, STRIDE: tl.constexpr, DIM: tl.constexpr, FORM: tl.constexpr):
    """Where a block's vectors (of ``DIM`` channels) begin behind the first ``skipped`` ones."""
    WIDTH: tl.constexpr = DIM * (FORM % 16) // 8
    return skipped // 16 * STRIDE if FORM > 64 else skipped * WIDTH


@Helper
def steps_of(held, log, TILE: tl.constexpr, STRIDE: tl.constexpr, FORM: tl.constexpr):
    """Steps or lows of a tile's rows: bfloat16, or codes of few bits."""
    quad = tl.arange(0, TILE // 4)
    if FORM > 64:
        words = held.to(tl.pointer_type(tl.int32)) + (quad // 4 * (STRIDE // 4) + quad % 4)
        words = tl.load(words)
        code = of_rows(words & 255, words >> 8 & 255, words >> 16 & 255, words >> 24 & 255)
        steps = tl.exp2(code.to(tl.float32) * 0.0625 + log)
    else:
        pairs = tl.load(held.to(tl.pointer_type(tl.int64)) + quad)
        a, b = pairs.to(tl.int32), (pairs >> 32).to(tl.int32)
        bits = of_rows(a << 16, a & -65536, b << 16, b & -65536)
        steps = bits.to(tl.float32, bitcast=True)
    return steps


@Helper
def of_rows(first, second, third, fourth):
    """Of the four entries of each quarter, [N] -> in the order of rows [4 N]."""
    each = tl.join(tl.join(first, second), tl.join(third, fourth))
    return each.permute(2, 1, 0).reshape(4 * first.shape[0])
