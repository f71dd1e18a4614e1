"""Cases of what Kara's default and ``--kv-cache-dtype`` add: a log in 4 bits, shares, levels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting
from bench.kernel_rows.level_cases import (
    attention_cases,
    chunks_of,
    kinds_of,
    pair_of,
)
from kvserve.kernels.attend.decode_inputs import (
    Chunks,
    DecodeInputs,
    FillInputs,
    RowTables,
    decode_inputs_torch,
    decode_inputs_triton,
)
from kvserve.kernels.layer import elementwise, elementwise_triton
from kvserve.kernels.score.seen import Given, Seen
from kvserve.kernels.score.window_scores import window_scores_torch
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.kernels.store.int4_log import (
    Int4Queries,
    gather_int4_torch,
    quantize,
    store_int4_torch,
)
from kvserve.kernels.store.int4_log_triton import gather_int4_triton, store_int4_triton
from kvserve.kernels.store.slot_mapping import slot_mapping
from kvserve.kernels.store.store_kv_triton import rotate_and_store_torch, rotate_and_store_triton


def share_cases(setting: Setting) -> Iterator[Case]:
    """Attention whose shares are logged."""
    cache, tables = setting.cache()
    dim = cache.shape[-1]
    for kernel, chunk, parts in kinds_of(setting):
        q, chunks = chunks_of(setting, chunk)
        inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
        num_bytes = 2 * setting.rows * setting.context * dim * q.itemsize
        yield from attention_cases(setting, f"{kernel} with shares", inputs, parts, num_bytes)


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

    yield pair_of("log in 4 bits", store, store_int4_triton, store_int4_torch, query.nbytes)
    lanes = torch.randint(0, 8 * shape[2], (sizes.layers, q_heads, rows * 9), device=device)

    def gather(kernel: Callable[..., Int4Queries]) -> Tensor:
        return kernel(log, lanes).float()

    yield pair_of("gather of 4 bits", gather, gather_int4_triton, gather_int4_torch, lanes.numel())
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

    yield pair_of(
        "absolute scores of 4 bits", score, window_scores_triton, window_scores_torch, keys.nbytes
    )


def elementwise_cases(setting: Setting) -> Iterator[Case]:
    """A layer's other kernels."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    tokens, width = setting.rows, q_heads * dim
    x, wide = setting.random(tokens, width), setting.random(tokens, q_heads + kv_heads, dim)
    weight, angles = setting.random(width), setting.random(2, tokens, 1, dim)
    for kernel, inputs, triton, plain in (
        ("norm", (x, weight, 1e-5), elementwise_triton.rms_norm_triton, elementwise.rms_norm),
        (
            "norm of heads",
            (wide[:, :q_heads], weight[:dim], 1e-5),
            elementwise_triton.rms_norm_triton,
            elementwise.rms_norm,
        ),
        ("rotation", (wide, *angles), elementwise_triton.rotate_triton, elementwise.rotate),
        ("activation", (x,), elementwise_triton.silu_and_mul_triton, elementwise.silu_and_mul),
    ):
        yield Case(kernel, partial(triton, *inputs), partial(plain, *inputs), 2 * x.nbytes)
    more = x, setting.random(tokens, width), weight, 1e-5
    yield Case(
        "sum and norm",
        lambda: torch.stack(elementwise_triton.add_rms_norm_triton(*more)),
        lambda: torch.stack(elementwise.add_rms_norm(*more)),
        4 * x.nbytes,
    )


def rotated_cases(setting: Setting) -> Iterator[Case]:
    """One launch of which a case compares the queries, and one the entries."""
    cache, tables = setting.cache()
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
        yield pair_of(name, run, *kernels, 2 * qkv.nbytes)


def inputs_cases(setting: Setting) -> Iterator[Case]:
    """The inputs of captured steps."""
    _, tables = setting.cache()
    for logs in (False, True):
        for chunk in (1, 4):
            yield inputs_case(setting, tables, logs, chunk)


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
    first, span, stride = torch.tensor([5, 5, 1], device=setting.device)[:, None].repeat(1, rows)
    state = RowTables(
        *(tables, lengths.fill_(newest).view(lanes), computed.fill_(newest)),
        *(tables, first, span, stride),
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
    return pair_of(name, fill, decode_inputs_triton, decode_inputs_torch, 2 * whole.nbytes)
