"""Cases of what Kara's default and ``--kv-cache-dtype`` add: a log in 4 bits, shares, levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, remainder_of
from kvserve.entry_format import FORMATS
from kvserve.kernels import elementwise
from kvserve.kernels.attention.paged_attention import Newest, paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.decode_inputs import (
    Chunks,
    DecodeInputs,
    FillInputs,
    RowTables,
    decode_inputs_torch,
    decode_inputs_triton,
)
from kvserve.kernels.dispatch import capability
from kvserve.kernels.int4_log import (
    Int4Queries,
    gather_int4_torch,
    gather_int4_triton,
    quantize,
    store_int4_torch,
    store_int4_triton,
)
from kvserve.kernels.quantized_entries import QuantizedBlocks
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.scores.window_scores import window_scores_torch
from kvserve.kernels.scores.window_scores_triton import window_scores_triton
from kvserve.kernels.shares import Given, Seen, Shares
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.kernels.storage import TORCH, TRITON, StorageKernels
from kvserve.kernels.store_kv import rotate_and_store_torch, rotate_and_store_triton
from kvserve.scheduler.layout import Granularity


def stored_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    """Attention whose shares are logged, the log, levels of each form, a layer's other kernels, and
    the inputs of a captured step."""
    yield from share_cases(setting, cache, tables)
    yield from log_cases(setting)
    if setting.dtype is not torch.float16:  # each is compiled anew
        for name in forms_of(setting):
            yield from level_cases(setting, name, tables)
    yield from elementwise_cases(setting)
    yield from rotated_cases(setting, cache, tables)
    for logs in (False, True):
        for chunk in (1, 4):
            yield inputs_case(setting, tables, logs, chunk)


def chunks_of(setting: Setting, chunk: int) -> tuple[Tensor, QuerySegments]:
    """Queries of the newest ``chunk`` tokens of every row."""
    q_heads, _, dim = SHAPES[setting.shape]
    device, rows, context = setting.device, setting.rows, setting.context
    last = torch.arange(context - chunk, context, device=device).repeat(rows).int()
    starts = None if chunk == 1 else torch.arange(rows + 1, device=device) * chunk
    last = last.expand(setting.layout.rows, -1).contiguous()
    chunks = QuerySegments(torch.arange(rows, device=device), last, context, starts, chunk)
    return setting.random(rows * chunk, q_heads, dim), chunks


def kinds_of(setting: Setting) -> Iterator[tuple[str, int, int | None]]:
    """Names of attention, tokens of a chunk, and parts of a context (``None``: as an engine does).

    For one shape and layout these are all tiles that an engine takes, in one part and in three.
    """
    yield "decode", 1, None
    yield "prefill", 5, None
    wide = setting.shape == "llama-8b" and setting.granularity is Granularity.MODEL
    if wide and setting.dtype is torch.bfloat16:
        for chunk in (1, 3, 5, 9, 40):
            for parts in (1, 3):
                yield f"{chunk} tokens in {parts} parts", chunk, parts


def share_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    dim = cache.shape[-1]
    for kernel, chunk, parts in kinds_of(setting):
        q, chunks = chunks_of(setting, chunk)
        inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
        num_bytes = 2 * setting.rows * setting.context * dim * q.itemsize
        yield from attention_cases(setting, f"{kernel} with shares", inputs, parts, num_bytes)


def attention_cases(
    setting: Setting,
    kernel: str,
    inputs: tuple[Any, ...],
    parts: int | None,
    num_bytes: int,
    newest: Newest | None = None,
) -> Iterator[Case]:
    """Attention, and beside it the shares that a log in 4 bits takes; in named parts without, too:
    so the prompts' part of a step has it, and other logs."""
    left = remainder_of(setting)
    q = inputs[0]
    recent = torch.arange(len(q), device=q.device) % 7 + 1
    told = Shares(torch.empty(q.shape[:2], device=q.device), recent)
    if newest is not None:
        own = newest.chunks
        assert own.first is not None
        newest = newest._replace(recent=recent)
        told = told._replace(recent=recent - (own.last - own.first + 1)[0])

    def attend(kernel: Callable[..., Tensor]) -> Tensor:
        out = kernel(*inputs, shares=told, remainder=left, newest=newest)
        return torch.cat([out, told.out[..., None].to(out.dtype)], dim=-1)

    def alone(kernel: Callable[..., Tensor]) -> Tensor:
        return kernel(*inputs, remainder=left, newest=newest)

    triton = partial(paged_attention_triton, num_splits=parts)
    yield _pair(kernel, attend, triton, paged_attention_torch, num_bytes)
    if parts is not None:
        name = f"{kernel}, entries alone"
        yield _pair(name, alone, triton, paged_attention_torch, num_bytes)


def log_cases(setting: Setting) -> Iterator[Case]:
    """Queries to the log and back, and Kara's scores by absolute attention."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    sizes, rows, device = setting.sizes, setting.rows, setting.device
    per_row = setting.layout.rows
    shape = 8, sizes.layers, 2 * sizes.window, q_heads // per_row
    log = quantize(setting.random(*shape, dim), -torch.rand(shape, device=device))
    slots = torch.randperm(8 * shape[2], device=device)[: per_row * rows].view(per_row, rows)
    query, shares = setting.random(rows, q_heads, dim), -torch.rand(rows, q_heads, device=device)

    def store(kernel: Callable[..., None]) -> Tensor:
        kernel(log, 1, slots, query, shares)
        return log.float()

    yield _pair("log in 4 bits", store, store_int4_triton, store_int4_torch, query.nbytes)
    lanes = torch.randint(0, 8 * shape[2], (sizes.layers, q_heads, rows * 9), device=device)

    def gather(kernel: Callable[..., Int4Queries]) -> Tensor:
        return kernel(log, lanes).float()

    yield _pair("gather of 4 bits", gather, gather_int4_triton, gather_int4_torch, lanes.numel())
    window = rows, sizes.layers, q_heads, sizes.window
    queries = quantize(setting.random(*window, dim), -torch.rand(window, device=device) - 0.1)
    keys = setting.random(rows, sizes.layers, kv_heads, sizes.window, dim)
    span = sizes.window - sizes.buffer
    seen = Seen(queries.shares, span, later=sizes.buffer)
    inputs = queries, keys, dim**-0.5, "sum_squares", "rms", seen

    def score(kernel: Callable[..., Tensor]) -> Tensor:
        lead = *queries.shape[:2], -1
        given = Given(
            torch.empty(window, device=device), torch.empty(*keys.shape[:3], span, device=device)
        )
        found = kernel(*inputs, given)
        return torch.cat([x.reshape(lead) for x in (found, *given)], dim=-1)

    yield _pair(
        "absolute scores of 4 bits", score, window_scores_triton, window_scores_torch, keys.nbytes
    )


def forms_of(setting: Setting) -> list[str]:
    """Those that the device can read."""
    e4m3 = capability(torch.device(setting.device)) >= (8, 9)
    return [name for name in FORMATS if name != "fp8" or e4m3]


def level_decodes(setting: Setting) -> Iterator[Case]:
    """Decoding over a cache of each form, whose time is to be seen beside numbers'."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    _, tables = setting.cache()
    left, entries = remainder_of(setting), setting.rows * setting.context
    for name in forms_of(setting):
        blocks, _, _, _ = level_blocks(setting, name, tables)
        q, chunks = chunks_of(setting, 1)
        chunks, newest = beside_newest(setting, name, chunks)
        inputs = q, *blocks.layer(0), tables[0], chunks, dim**-0.5
        yield Case(
            f"decode of {name}",
            partial(paged_attention_triton, *inputs, remainder=left, newest=newest),
            partial(paged_attention_torch, *inputs, remainder=left, newest=newest),
            entries * kv_heads * FORMATS[name].entry_bytes(dim) + 2 * q.nbytes,
            4 * q_heads * dim * entries,
        )


def level_blocks(
    setting: Setting, name: str, tables: Tensor
) -> tuple[QuantizedBlocks, Tensor, Tensor, Tensor]:
    """A cache whose first layer is full, the slots of its entries, and their keys and values."""
    layout, form = setting.layout, FORMATS[name]
    _, kv_heads, dim = SHAPES[setting.shape]
    lane = form.lane_bytes(layout.block_size, dim)
    shape = tables.numel() + 1, layout.layers_per_block, layout.heads_per_block * lane
    pool = torch.zeros(shape, dtype=torch.uint8, device=setting.device)
    blocks = QuantizedBlocks(pool, form, layout.block_size, dim)
    rows = torch.arange(setting.rows, device=setting.device).repeat_interleave(setting.context)
    place = torch.arange(setting.context, device=setting.device).repeat(setting.rows)
    at = place.expand(1, layout.rows, -1)
    slots = slot_mapping(tables[:1], rows, at, layout.block_size)[0]
    key, value = (setting.random(len(rows), kv_heads, dim) for _ in range(2))
    TORCH.store_levels(blocks, 0, slots, key, value)
    return blocks, slots, key, value


def beside_newest(
    setting: Setting, name: str, chunks: QuerySegments
) -> tuple[QuerySegments, Newest | None]:
    """What tokens see of levels, and of the newest entries as an engine holds these for the form:
    as they were computed, in blocks of as many bytes; half of a short context at most."""
    layout, form = setting.layout, FORMATS[name]
    if not form.newest:
        return chunks, None
    size = form.newest_tokens(layout.block_size, layout.head_dim, setting.dtype.itemsize)
    window = min(form.newest, setting.context // 2)
    columns = -(-setting.context // size)
    count = setting.rows * layout.rows * columns
    blocks = torch.randperm(count, device=setting.device).int() + 1
    shape = 2, count + 1, size, layout.heads_per_block, layout.head_dim
    first = chunks.last // window * window
    own = chunks._replace(first=first, max_held=window + chunks.max_chunk)
    table = blocks.view(setting.rows, layout.rows, columns)
    keys, values = setting.random(*shape)
    return chunks._replace(last=first - 1), Newest(keys, values, table, own)


def level_cases(setting: Setting, name: str, tables: Tensor) -> Iterator[Case]:
    """A cache of levels: stored, attended to, gathered, moved."""
    _, kv_heads, dim = SHAPES[setting.shape]
    blocks, slots, key, value = level_blocks(setting, name, tables)
    lanes = slots.expand(kv_heads, -1)[None]
    for kind, chunk, parts in kinds_of(setting):
        q, chunks = chunks_of(setting, chunk)
        chunks, newest = beside_newest(setting, name, chunks)
        inputs = q, *blocks.layer(0), tables[0], chunks, dim**-0.5
        kernel, size = f"{kind} of {name}", 2 * key.numel()
        yield from attention_cases(setting, kernel, inputs, parts, size, newest)

    def store(kernels: StorageKernels) -> Tensor:
        kernels.store_levels(blocks, 0, slots, value, key)
        return blocks.pool.int()

    def gather(kernels: StorageKernels) -> Tensor:
        parts = [
            kernels.gather_levels(blocks, lanes, None, setting.dtype, values)
            for values in (False, True)
        ]
        return torch.cat(parts)

    def move(kernels: StorageKernels) -> Tensor:
        kernels.move_levels(blocks, lanes[..., 3:], lanes[..., :-3], 1)
        return blocks.pool.int()

    for kernel, run in (("gather", gather), ("store", store), ("move", move)):
        yield _pair(f"{kernel} of {name}", run, TRITON, TORCH, key.numel())


def elementwise_cases(setting: Setting) -> Iterator[Case]:
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    tokens, width = setting.rows, q_heads * dim
    x, wide = setting.random(tokens, width), setting.random(tokens, q_heads + kv_heads, dim)
    weight, angles = setting.random(width), setting.random(2, tokens, 1, dim)
    for kernel, inputs, triton, plain in (
        ("norm", (x, weight, 1e-5), elementwise.rms_norm_triton, elementwise.rms_norm),
        (
            "norm of heads",
            (wide[:, :q_heads], weight[:dim], 1e-5),
            elementwise.rms_norm_triton,
            elementwise.rms_norm,
        ),
        ("rotation", (wide, *angles), elementwise.rotate_triton, elementwise.rotate),
        ("activation", (x,), elementwise.silu_and_mul_triton, elementwise.silu_and_mul),
    ):
        yield Case(kernel, partial(triton, *inputs), partial(plain, *inputs), 2 * x.nbytes)
    more = x, setting.random(tokens, width), weight, 1e-5
    yield Case(
        "sum and norm",
        lambda: torch.stack(elementwise.add_rms_norm_triton(*more)),
        lambda: torch.stack(elementwise.add_rms_norm(*more)),
        4 * x.nbytes,
    )


def rotated_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    """One launch of which a case compares the queries, and one the entries."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    rows = torch.arange(setting.rows, device=setting.device)
    last = torch.full_like(rows, setting.context - 1).expand(1, setting.layout.rows, -1)
    slots = slot_mapping(tables[:1], rows, last, setting.sizes.block)[0]
    qkv = setting.random(setting.rows, q_heads + 2 * kv_heads, dim)
    qk, value = qkv.split([q_heads + kv_heads, kv_heads], dim=1)
    inputs = cache, 0, slots, qk, value, *setting.random(2, setting.rows, 1, dim)

    def turn(kernel: Callable[..., Tensor]) -> Tensor:
        return kernel(*inputs)

    def store(kernel: Callable[..., Tensor]) -> Tensor:
        kernel(*inputs)
        return cache

    kernels = rotate_and_store_triton, rotate_and_store_torch
    for name, run in (("rotation and store", turn), ("store of rotated keys", store)):
        yield _pair(name, run, *kernels, 2 * qkv.nbytes)


def inputs_case(setting: Setting, tables: Tensor, logs: bool, chunk: int = 1) -> Case:
    """Inputs of a captured step of which the last row is padding, each row at its newest entry; a
    row has ``chunk`` tokens, of which the last is padding.

    What is filled and counted are parts of one tensor, so that a run is one launch."""
    lanes, rows, block = tables.shape[:3], setting.rows, setting.sizes.block
    by_token, by_lane = (rows * chunk,), (lanes[0], lanes[2], rows * chunk)
    shapes = [by_token, by_lane, by_lane, *([by_lane, by_token] if logs else [])]
    sizes = [math.prod(shape) for shape in (*shapes, lanes, (rows,))]
    whole = torch.full((sum(sizes),), -7, device=setting.device)
    *parts, lengths, computed = whole.split(sizes)
    newest = setting.context - chunk
    by_row = torch.full((2, rows), 5, device=setting.device)
    state = RowTables(
        *(tables, lengths.fill_(newest).view(lanes), computed.fill_(newest)),
        *(tables, by_row[0], by_row[1]),
        *(block, block),
    )
    new = DecodeInputs(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
    if chunk > 1:
        every = torch.arange(rows + 1, device=setting.device)
        real = torch.full_like(every[:-1], chunk - 1)
        new = replace(new, chunks=Chunks(chunk * every, real, every[:-1].repeat_interleave(chunk)))
    count = torch.tensor(max(1, rows - 1), device=setting.device)

    def fill(kernel: FillInputs) -> Tensor:
        kernel(state, new, count)
        return whole

    name = ("inputs of a logged step" if logs else "inputs of a step") + " of chunks" * (chunk > 1)
    return _pair(name, fill, decode_inputs_triton, decode_inputs_torch, 2 * whole.nbytes)


def _pair(
    kernel: str,
    run: Callable[..., Tensor],
    triton: object,
    reference: object,
    num_bytes: int,
) -> Case:
    return Case(kernel, partial(run, triton), partial(run, reference), num_bytes)
