"""The inputs of a captured step, by Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvserve.kernels.attend.decode_inputs import DecodeInputs, RowTables, check
from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 256


def decode_inputs_triton(rows: RowTables, inputs: DecodeInputs, count: Tensor) -> None:
    """One program per row. Columns that a table does not have count as the null block."""
    check(rows, inputs)
    groups, num_rows, heads, columns = rows.block_tables.shape
    lanes, logs, chunks = groups * heads, inputs.query_slots is not None, inputs.chunks
    tokens = len(inputs.positions)
    _decode_inputs.launch(
        (tokens if chunks is None else len(chunks.lengths),),
        *(inputs.positions, inputs.slots, inputs.last),
        *((inputs.query_slots, inputs.recent) if logs else (inputs.slots, inputs.positions)),
        *(rows.kv_lens, rows.num_computed, count),
        *((count, count) if chunks is None else (chunks.starts, chunks.lengths)),
        *(rows.block_tables, rows.log_tables, rows.log_from, rows.log_span, rows.log_stride),
        *(tokens, num_rows, columns, rows.log_tables.shape[3]),
        HEADS=heads,
        LANES=lanes,
        TILE=min(_TILE, 1 << (lanes - 1).bit_length()),
        BLOCK=rows.block_tokens,
        LOG_BLOCK=rows.log_block_tokens,
        LOGS=logs,
        CHUNKED=chunks is not None,
        num_warps=1,
    )


@Kernel
def _decode_inputs(
    positions,
    slots,
    last,
    query_slots,
    recent,
    kv_lens,
    num_computed,
    count,
    starts,
    lengths,
    tables,
    log_tables,
    log_from,
    log_span,
    log_stride,
    tokens,
    num_rows,
    columns,
    log_columns,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    LOGS: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    added = (row < tl.load(count)).to(tl.int64)
    start, end = row, row + 1
    if CHUNKED:
        added *= tl.load(lengths + row)
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
    computed = tl.load(num_computed + row)
    if LOGS:
        begin, span = tl.load(log_from + row), tl.load(log_span + row)
        stride = tl.load(log_stride + row)
    for token in range(start, end):
        offset = token - start
        real = offset < added
        position = tl.where(real, computed + offset, 0)
        tl.store(positions + token, position)
        if LOGS:
            behind = tl.maximum(position - begin, 0)
            tl.store(recent + token, behind % span + 1)
            logged = begin // stride + behind // stride
            logs = real & (position >= begin) & (behind % stride == stride - 1)
        for first in range(0, LANES, TILE):
            lane = first + tl.arange(0, TILE)
            there = lane < LANES
            place = (lane // HEADS * num_rows + row) * HEADS + lane % HEADS
            entry = tl.load(kv_lens + place, mask=there & real, other=0) + offset
            column = entry // BLOCK
            known = there & real & (column < columns)
            block = tl.load(tables + place * columns + column, mask=known, other=0).to(tl.int64)
            target = lane.to(tl.int64) * tokens + token
            slot = tl.where(known, block * BLOCK + entry % BLOCK, 0)
            tl.store(slots + target, slot, mask=there)
            tl.store(last + target, tl.where(real, entry, -1), mask=there)
            if LOGS:
                column = logged // LOG_BLOCK
                known = there & logs & (column < log_columns)
                block = tl.load(log_tables + place * log_columns + column, mask=known, other=0)
                slot = block.to(tl.int64) * LOG_BLOCK + logged % LOG_BLOCK
                tl.store(query_slots + target, tl.where(known, slot, 0), mask=there)
    tl.debug_barrier()  # all threads have read what one of them overwrites
    for first in range(0, LANES, TILE):
        lane = first + tl.arange(0, TILE)
        there = (lane < LANES) & (added > 0)
        place = (lane // HEADS * num_rows + row) * HEADS + lane % HEADS
        entry = tl.load(kv_lens + place, mask=there, other=0)
        tl.debug_barrier()
        tl.store(kv_lens + place, entry + added, mask=there)
    tl.store(num_computed + row, computed + added, mask=added > 0)
