"""Products with weights that are held as levels, in Triton: of all rows, or of each expert's.

A program widens a tile of the weight as it reads it, with scales and offsets applied in float32,
and multiplies it in the type of x; sums are float32. Levels of 4 bits become whole numbers by
masks: up to 32 rows meet them so, and the scale meets the sums of its group; for more rows the
numbers meet it first, which rounds them as the others are rounded. Each tile of rows widens the
weight again, so that many rows are faster if the whole weight is widened once, for torch's product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.kernels import dispatch
from kvserve.kernels.dispatch import Helper, Kernel, interprets
from kvserve.kernels.layer.weight_levels import BLOCK, Levels, levels_of_rows

if TYPE_CHECKING:
    import triton.language as tl

_OFFSETS = ("", "zero", "minimum")
_INT4, _INT8, _E4M3 = range(3)
WIDENED_ROWS = 129
"""From so many rows on, the whole weight is widened first. An H100's times for 64 and 256 rows of
[28672, 4096], and its bandwidth, put the bound here; ``gpu_check --part choices`` times both."""
_WIDENED_AT_ONCE = 2**27  # weights: 256 MiB in 16 bits


def linear_levels_triton(x: Tensor, weight: Levels, bias: Tensor | None = None) -> Tensor:
    """As ``linear_levels``."""
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not x.dtype):
        raise ValueError(f"linear: bias {list(bias.shape)} of {bias.dtype} does not fit")
    if len(x) >= WIDENED_ROWS and not weight.form.rounds:
        return _multiply_widened(x, weight, bias)
    return _multiply(x, weight, bias, None)


def _multiply_widened(x: Tensor, weight: Levels, bias: Tensor | None) -> Tensor:
    """By torch's product; a weight as large as a head is widened part by part."""
    outputs, width = weight.shape
    rows = max(1, _WIDENED_AT_ONCE // width)
    if outputs <= rows:
        return F.linear(x, widen_triton(weight, x.dtype), bias)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        wide = widen_triton(weight[part], x.dtype)
        out[:, part] = F.linear(x, wide, None if bias is None else bias[part])
    return out


def widen_triton(weight: Levels, dtype: torch.dtype) -> Tensor:
    """The whole weight [outputs, width] as numbers."""
    outputs, width = weight.shape
    out = torch.empty(outputs, width, dtype=dtype, device=weight.device)
    inner, one_group = _inner(weight)
    _widen_levels.launch(
        (-(-outputs // 64), -(-weight.inputs // inner)),
        *(out, weight.levels, weight.scales, weight.offsets, weight.order),
        *(outputs, width, weight.inputs, weight.form.group, weight.scales.shape[-1]),
        CODE=_code(weight),
        LOWEST=weight.form.lowest,
        OFFSETS=_OFFSETS.index(weight.form.offsets),
        ONE_GROUP=one_group,
        COLUMNS=64,
        INNER=inner,
        num_warps=4,
    )
    return out


def expert_linear_levels_triton(x: Tensor, weight: Levels, ends: Tensor) -> Tensor:
    """As ``expert_linear_levels``; nothing is copied to the host."""
    if ends.shape != weight.shape[:1] or ends.dtype is not torch.int32:
        raise ValueError(f"expert_linear: ends {list(ends.shape)} of {ends.dtype}")
    return _multiply(x, weight, None, ends)


def _multiply(x: Tensor, weight: Levels, bias: Tensor | None, ends: Tensor | None) -> Tensor:
    form, (*_, outputs, width) = weight.form, weight.shape
    if x.shape[1] != width or x.stride(1) != 1 or (weight.levels.dim() == 3) != (ends is not None):
        raise ValueError(
            f"linear: x {list(x.shape)} does not fit levels {list(weight.shape)}, or its rows are "
            "not dense"
        )
    steps = None
    if form.rounds:
        levels, steps = levels_of_rows(x)
        x = levels.to(x.dtype)  # whole numbers up to 128, which all types hold
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    inner, one_group = _inner(weight)
    # Sums of a group beside those of all would not leave registers enough for 64 rows.
    sums = len(x) <= 32
    exact = form.bits == 4 and one_group and form.offsets != "minimum"
    exact = exact and x.dtype is not torch.float32
    exact = exact and (sums or form.scales in (x.dtype, torch.float16))
    experts = 1 if ends is None else len(ends)
    rows, columns = _tile(x, outputs, experts, exact)
    _multiply_levels.launch(
        (-(-outputs // columns), _tiles(x, rows, experts)),
        *(out, x, weight.levels, weight.scales, weight.offsets, weight.order, bias, steps, ends),
        *(len(x), outputs, width, weight.inputs, x.stride(0)),
        *(form.group, weight.scales.shape[-1]),
        CODE=_code(weight),
        LOWEST=form.lowest,
        OFFSETS=_OFFSETS.index(form.offsets),
        EXPERTS=experts,
        SPAN=1 << (experts - 1).bit_length(),
        ONE_GROUP=one_group,
        ROWS=rows,
        COLUMNS=columns,
        INNER=inner,
        EXACT=exact,
        SUMS=sums,
        ASM=not interprets(),
        num_warps=4,
        num_stages=3 if rows < 128 else 2,  # two programs have room on a multiprocessor
    )
    return out


def _tile(x: Tensor, outputs: int, experts: int, exact: bool) -> tuple[int, int]:
    """Rows and columns of a program: as many as registers hold and as leave each multiprocessor a
    program. They change no order of a sum."""

    def busy(rows: int, columns: int) -> bool:
        programs = _tiles(x, rows, experts) * -(-outputs // columns)
        return programs >= dispatch.num_processors(x.device)

    rows = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
    columns = 32 if rows == 16 else 64
    large = dispatch.generation(x.device) == (9, 0) and x.dtype is not torch.float32
    if len(x) > 64 and experts == 1 and large and busy(128, columns):
        rows = 128
    most = 128 if exact and (large or rows < 64) else 64
    while columns < most and busy(rows, 2 * columns):
        columns *= 2
    return rows, columns


def _tiles(x: Tensor, rows: int, experts: int) -> int:
    """Tiles of rows, of which each expert's last is not full."""
    return -(-len(x) // rows) + (experts - 1) * bool(len(x))


def _code(weight: Levels) -> int:
    return _E4M3 if weight.form.e4m3 else _INT4 if weight.form.bits == 4 else _INT8


def _inner(weight: Levels) -> tuple[int, bool]:
    """Inputs at a time: of one group if that has so many, since its scale is then read once; and
    whether they are of one."""
    group = weight.form.group
    inner = next((n for n in (128, 64, 32) if group % n == 0), BLOCK)
    return inner, group % inner == 0 or group >= weight.inputs


@Helper
def scaled(
    levels, scales, offsets, row_mask, group, known, LOWEST: tl.constexpr, OFFSETS: tl.constexpr
):
    """Numbers of levels [columns, inputs]; ``scales`` and ``offsets`` point to each output's first,
    ``group`` [1 or inputs] is that of each input."""
    mask = row_mask[:, None] & known[None]
    scale = tl.load(scales[:, None] + group[None], mask=mask, other=0.0).to(tl.float32)
    numbers = levels.to(tl.float32) + LOWEST
    if OFFSETS == 0:
        numbers *= scale
    else:
        offset = tl.load(offsets[:, None] + group[None], mask=mask, other=0.0).to(tl.float32)
        numbers = (numbers - offset) * scale if OFFSETS == 1 else numbers * scale + offset
    return numbers


@Helper
def x_at(x, order, place, row_mask, width, inputs):
    """x [rows, places] of these inputs, 0 where there is none; ``x`` points to rows."""
    mask = place < inputs
    if order is not None:
        place = tl.load(order + place, mask=mask, other=-1)
        mask = mask & (place >= 0)
    mask = mask & (place < width)
    return tl.load(x[:, None] + place[None], mask=row_mask[:, None] & mask[None], other=0.0)


@Helper
def byte_numbers(stored, CODE: tl.constexpr):
    """float32 of bytes that are whole numbers, or e4m3."""
    if CODE == 1:
        return stored.to(tl.int8, bitcast=True).to(tl.float32)
    # e4m3's bits are those of a float16 whose exponent is 8 too small.
    bits = stored.to(tl.uint16)
    bits = (bits & 128) << 8 | (bits & 127) << 7
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@Helper
def with_upper_byte(both, UPPER: tl.constexpr, ASM: tl.constexpr):
    """int16 of the lower and of the upper four bits of bytes, below an ``UPPER`` byte."""
    if ASM:
        lower, upper = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $4, 0x0f0f0f0f;
            shr.b32 high, $4, 4;
            and.b32 high, high, 0x0f0f0f0f;
            prmt.b32 $0, low, $5, 0x5140;
            prmt.b32 $1, low, $5, 0x5342;
            prmt.b32 $2, high, $5, 0x5140;
            prmt.b32 $3, high, $5, 0x5342;
            }""",
            "=r,=r,=r,=r,r,r",
            [both, tl.full((1, 1), UPPER, tl.uint8)],
            dtype=(tl.int16, tl.int16),
            is_pure=True,
            pack=4,
        )
    else:
        lower, upper = (both & 15).to(tl.int16), (both >> 4).to(tl.int16)
        lower, upper = lower | UPPER << 8, upper | UPPER << 8
    return lower, upper


@Helper
def by_scale(levels, scale):
    """Whole numbers [columns, inputs] by their scale [columns], rounded once, as from float32: 8 of
    a float16's 11 bits, and the product with the rest, are exact in bfloat16."""
    large = scale.to(levels.dtype)
    if scale.dtype == levels.dtype:
        numbers = levels * large[:, None]
    else:
        small = (scale.to(tl.float32) - large.to(tl.float32)).to(levels.dtype)
        numbers = tl.fma(
            levels, tl.broadcast_to(large[:, None], levels.shape), levels * small[:, None]
        )
    return numbers


@Helper
def put(out, order, numbers, place, row_mask, width, inputs):
    """Write numbers [columns, inputs] where the numbers of x stand that they belong to."""
    mask = place < inputs
    if order is not None:
        place = tl.load(order + place, mask=mask, other=-1)
        mask = mask & (place >= 0)
    mask = row_mask[:, None] & (mask & (place < width))[None]
    tl.store(out[:, None] + place[None], numbers.to(out.dtype.element_ty), mask=mask)


@Kernel
def _widen_levels(
    out,
    levels,
    scales,
    offsets,
    order,
    outputs,
    width,
    inputs,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    LOWEST: tl.constexpr,
    OFFSETS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    column, at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1) * INNER
    column_mask = column < outputs
    output = column.to(tl.int64)
    levels += output * (inputs // 2 if CODE == 0 else inputs)
    scales += output * num_groups
    out += output * width
    if offsets is not None:
        offsets += output * num_groups
    if CODE == 0:
        byte = tl.arange(0, INNER // 2)
        low = at + byte // 16 * 32 + byte % 16
        known = low < inputs
        mask = column_mask[:, None] & known[None]
        both = tl.load(levels[:, None] + (at // 2 + byte)[None], mask=mask, other=0)
        for high in tl.static_range(2):
            place, nibbles = low + 16 * high, both >> 4 * high & 15
            if ONE_GROUP:
                group, valid = at // group_size + tl.arange(0, 1), tl.arange(0, 1) == 0
            else:
                group, valid = place // group_size, known
            some = scaled(nibbles, scales, offsets, column_mask, group, valid, LOWEST, OFFSETS)
            put(out, order, some, place, column_mask, width, inputs)
    else:
        place = at + tl.arange(0, INNER)
        known = place < inputs
        mask = column_mask[:, None] & known[None]
        number = byte_numbers(tl.load(levels[:, None] + place[None], mask=mask, other=0), CODE)
        if ONE_GROUP:
            group, valid = at // group_size + tl.arange(0, 1), tl.arange(0, 1) == 0
        else:
            group, valid = place // group_size, known
        some = scaled(number, scales, offsets, column_mask, group, valid, LOWEST, OFFSETS)
        put(out, order, some, place, column_mask, width, inputs)


@Kernel
def _multiply_levels(
    out,
    x,
    levels,
    scales,
    offsets,
    order,
    bias,
    steps,
    ends,
    tokens,
    outputs,
    width,
    inputs,
    x_stride,
    group_size,
    num_groups,
    CODE: tl.constexpr,
    LOWEST: tl.constexpr,
    OFFSETS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPAN: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    EXACT: tl.constexpr,
    SUMS: tl.constexpr,
    ASM: tl.constexpr,
):
    tile = tl.program_id(1)
    first, last, expert = tile * ROWS, tokens, 0
    if ends is not None:
        # Each expert's rows are tiles of their own: which of them is this?
        every = tl.arange(0, SPAN)
        stop = tl.load(ends + every, mask=every < EXPERTS, other=tokens)
        start = tl.load(ends + every - 1, mask=(every > 0) & (every < EXPERTS), other=0)
        start = tl.where(every < EXPERTS, start, stop)
        after = tl.cumsum((stop - start + ROWS - 1) // ROWS, axis=0)
        expert = tl.sum((after <= tile).to(tl.int32), axis=0)
        mine = every == expert
        before = tl.sum(tl.where(every == expert - 1, after, 0), axis=0)
        first = tl.sum(tl.where(mine, start, 0), axis=0) + (tile - before) * ROWS
        last = tl.sum(tl.where(mine, stop, 0), axis=0)
        if expert >= EXPERTS:
            return
    row, column = first + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask, column_mask = row < last, column < outputs
    output = tl.cast(expert, tl.int64) * outputs + column
    row_bytes = inputs // 2 if CODE == 0 else inputs
    levels += output * row_bytes
    scales += output * num_groups
    if offsets is not None:
        offsets += output * num_groups
    if order is not None:
        order += tl.cast(expert, tl.int64) * inputs
    x += row.to(tl.int64) * x_stride
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, inputs, INNER):
        if CODE == 0:
            # In each 32 inputs, number j is below number j + 16.
            byte = tl.arange(0, INNER // 2)
            low = at + byte // 16 * 32 + byte % 16
            known = low < inputs
            both = tl.load(
                levels[:, None] + (at // 2 + byte)[None],
                mask=column_mask[:, None] & known[None],
                other=0,
            )
            near = x_at(x, order, low, row_mask, width, inputs)
            far = x_at(x, order, low + 16, row_mask, width, inputs)
            if EXACT:
                # An upper byte makes a level n a number: 128 + n in bfloat16, 1,024 + n in float16.
                UPPER: tl.constexpr = 0x43 if near.dtype == tl.bfloat16 else 0x64
                group = at // group_size
                scale = tl.load(scales + group, mask=column_mask, other=0.0)
                base = tl.full((COLUMNS,), (128 if UPPER == 0x43 else 1024) - LOWEST, tl.float32)
                if OFFSETS == 1:
                    base += tl.load(offsets + group, mask=column_mask, other=0.0).to(tl.float32)
                base = base[:, None].to(near.dtype)
                lower, upper = with_upper_byte(both, UPPER, ASM)
                lower = lower.to(near.dtype, bitcast=True) - base
                upper = upper.to(near.dtype, bitcast=True) - base
                if SUMS:
                    some = tl.dot(far, tl.trans(upper), tl.dot(near, tl.trans(lower)))
                    total += some * scale.to(tl.float32)[None]
                else:
                    total = tl.dot(near, tl.trans(by_scale(lower, scale)), total)
                    total = tl.dot(far, tl.trans(by_scale(upper, scale)), total)
            else:
                if ONE_GROUP:
                    group, valid = at // group_size + tl.arange(0, 1), tl.arange(0, 1) == 0
                    high_group, high_valid = group, valid
                else:
                    group, valid, high_group = low // group_size, known, (low + 16) // group_size
                    high_valid = known
                weight = scaled(
                    both & 15, scales, offsets, column_mask, group, valid, LOWEST, OFFSETS
                )
                total = tl.dot(near, tl.trans(weight.to(near.dtype)), total, input_precision="ieee")
                weight = scaled(
                    both >> 4, scales, offsets, column_mask, high_group, high_valid, LOWEST, OFFSETS
                )
                total = tl.dot(far, tl.trans(weight.to(near.dtype)), total, input_precision="ieee")
        else:
            place = at + tl.arange(0, INNER)
            known = place < inputs
            stored = tl.load(
                levels[:, None] + place[None], mask=column_mask[:, None] & known[None], other=0
            )
            number = byte_numbers(stored, CODE)
            if ONE_GROUP:
                group, valid = at // group_size + tl.arange(0, 1), tl.arange(0, 1) == 0
            else:
                group, valid = place // group_size, known
            weight = scaled(number, scales, offsets, column_mask, group, valid, LOWEST, OFFSETS)
            numbers = x_at(x, order, place, row_mask, width, inputs)
            total = tl.dot(
                numbers, tl.trans(weight.to(numbers.dtype)), total, input_precision="ieee"
            )
    if steps is not None:
        total *= tl.load(steps + row, mask=row_mask, other=0.0)[:, None]
    if bias is not None:
        total += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None]
    place = row.to(tl.int64)[:, None] * outputs + column[None]
    mask = row_mask[:, None] & column_mask[None]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)
