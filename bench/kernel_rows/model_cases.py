"""Cases of contexts in parts, of layers with windows and sinks, of scores by where queries point,
of weights held as levels, and of layers with states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, event_cases, step_cases
from bench.kernel_rows.level_cases import (
    FORMS,
    chunks_of,
    kinds_of,
    level_cases,
    unequal_cases,
)
from bench.kernel_rows.stored_cases import (
    elementwise_cases,
    inputs_cases,
    log_cases,
    rotated_cases,
    share_cases,
)
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.layer import gated_delta, gated_delta_triton
from kvserve.kernels.layer.weight_levels import (
    LevelForm,
    Levels,
    expert_linear_levels,
    linear_levels,
)
from kvserve.kernels.layer.weight_levels_triton import (
    expert_linear_levels_triton,
    linear_levels_triton,
)
from kvserve.kernels.score.centre_scores import OFFSETS, centre_scores_by_head
from kvserve.kernels.score.centre_scores_triton import centre_scores_triton

AWQ = LevelForm(4, 128, lowest=-8, offsets="zero")
WEIGHTS = {
    "4 bits": AWQ,
    "Q4_1": LevelForm(4, 32, offsets="minimum"),
    "Q8_0": LevelForm(8, 32),
    "FP8": LevelForm(8, 4096, torch.float32, e4m3=True),
    "W8A8": LevelForm(8, 4096, torch.float32, rounds=True),
}


def split_cases(setting: Setting) -> Iterator[Case]:
    """Attention as under ``none``; decoding in three parts."""
    cache, tables = setting.cache()
    _, kv_heads, dim = SHAPES[setting.shape]
    num_bytes = 2 * setting.rows * setting.context * kv_heads * dim * setting.dtype.itemsize
    forms = [(f"{kind} of none", chunk, parts) for kind, chunk, parts in kinds_of(setting)]
    for kernel, chunk, parts in (*forms, ("decode in parts", 1, 3)):
        q, chunks = chunks_of(setting, chunk)
        inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], chunks, dim**-0.5
        yield Case(
            kernel,
            partial(paged_attention_triton, *inputs, num_splits=parts),
            partial(paged_attention_torch, *inputs),
            num_bytes,
        )


def window_cases(setting: Setting) -> Iterator[Case]:
    """Tokens that see the newest third of the context, a sink for each head, and capped logits."""
    cache, tables = setting.cache()
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    window = setting.context // 3
    sinks = torch.randn(q_heads, device=setting.device)
    for kind, chunk, parts in kinds_of(setting):
        q, chunks = chunks_of(setting, chunk)
        seen = chunks._replace(first=(chunks.last - window + 1).contiguous())
        inputs = q, cache[:, 0, 0], cache[:, 0, 1], tables[0], seen, dim**-0.5
        num_bytes = 2 * setting.rows * window * kv_heads * dim * q.itemsize
        beside: dict[str, Any] = {"sinks": sinks, "soft_cap": 30.0}
        yield Case(
            f"{kind} in a window",
            partial(paged_attention_triton, *inputs, num_splits=parts, **beside),
            partial(paged_attention_torch, *inputs, **beside),
            num_bytes,
        )


def centre_cases(setting: Setting) -> Iterator[Case]:
    """TriAttention's scores of a window's keys, with one vector for all distances and with each."""
    q_heads, kv_heads, dim = SHAPES[setting.shape]
    sizes, rows, device = setting.sizes, setting.rows, setting.device
    keys = setting.random(rows, sizes.layers, kv_heads, sizes.window, dim)
    spread = torch.rand(sizes.layers, q_heads, dim // 2, device=device)
    for kernel, count in (("scores by centres", 1), ("scores by the best centre", len(OFFSETS))):
        vectors = torch.randn(rows, sizes.layers, q_heads, count, dim, device=device)
        yield Case(
            kernel,
            partial(centre_scores_triton, keys, vectors, spread),
            partial(centre_scores_by_head, keys, vectors, spread),
            keys.nbytes,
            2 * rows * sizes.layers * q_heads * sizes.window * dim * count,
            sizes.layers,
        )


def random_levels(form: LevelForm, shape: tuple[int, ...], setting: Setting) -> Levels:
    """A weight, for x of the setting's type."""
    with torch.device(setting.device):
        form = replace(form, group=min(form.group, shape[-1]))
        weight = Levels.empty(form, shape, shape[-1])
    weight.dtype = setting.dtype
    weight.levels.random_(0, 256)
    if form.e4m3:
        weight.levels.bitwise_and_(0xF7)  # no nan
    weight.scales.uniform_(0.001, 0.02)
    if weight.offsets is not None:
        weight.offsets.random_(-8, 8)
        if form.offsets == "minimum":
            weight.offsets.mul_(0.01)
    return weight


def weight_cases(setting: Setting) -> Iterator[Case]:
    """Products of the rows with a weight of each form; of 70 rows and of 300, which widen it first,
    with one in 4 bits; and of 70 that experts share."""
    q_heads, _, dim = SHAPES[setting.shape]
    width = q_heads * dim
    for name, form in WEIGHTS.items():
        further = [(" of more", 70), (" of many", 300)] if form is AWQ else []
        for kind, rows in (("", setting.rows), *further):
            weight, x = random_levels(form, (width, width), setting), setting.random(rows, width)
            by_kernel = partial(linear_levels_triton, x, weight)
            by_torch = partial(linear_levels, x, weight)
            flops = 2 * rows * width**2
            yield Case(f"product{kind} in {name}", by_kernel, by_torch, weight.nbytes, flops)
    weight, x = random_levels(AWQ, (4, width, width), setting), setting.random(70, width)
    ends = torch.tensor([3, 3, 40, 70], dtype=torch.int32, device=setting.device)
    yield Case(
        "product of experts in 4 bits",
        partial(expert_linear_levels_triton, x, weight, ends),
        partial(expert_linear_levels, x, weight, ends),
        weight.nbytes,
        2 * 70 * width**2,
    )


def state_cases(setting: Setting) -> Iterator[Case]:
    """A layer that keeps states: of each row a token, or a third of the context beside a token."""
    heads, key_heads, dim = SHAPES[setting.shape]
    channels, rows, device = (2 * key_heads + heads) * dim, setting.rows, setting.device
    taps, scale = setting.random(4, channels), setting.random(dim)
    decay = torch.randn(2, heads, device=device)
    tails, states = setting.random(rows, channels, 3), torch.randn(rows, heads, dim, dim)
    states = states.to(device)
    for kernel, longest in (("a token", 1), ("chunks", setting.context // 3)):
        starts = torch.tensor([0, *[longest] * (rows - 1), 1], device=device).cumsum(0)
        chunks = gated_delta.RowChunks(torch.arange(rows, device=device), starts, longest)
        x = setting.random(int(starts[-1]), channels + heads * (dim + 2))
        parts = x.split([channels, heads * dim, heads, heads], dim=1)

        def run(own: Any, chunks: Any = chunks, parts: Any = parts) -> Tensor:
            """What is read, and the states behind it."""
            (qkv, gate, b, a), tail, state = parts, tails.clone(), states.clone()
            qkv = own.causal_convolution(qkv, taps, tail, chunks)
            read = own.gated_delta_rule(qkv, b, a, decay, state, chunks)
            read = own.gated_norm(read, scale, gate, 1e-6)
            return torch.cat([read.flatten(), tail.flatten(), state.flatten()])

        triton, plain = partial(run, gated_delta_triton), partial(run, gated_delta)
        yield Case(f"states of {kernel}", triton, plain, 2 * states.nbytes)
    yield Case(
        "gate",
        partial(gated_delta_triton.sigmoid_gate, scale[None], taps[:1, :dim]),
        partial(gated_delta.sigmoid_gate, scale[None], taps[:1, :dim]),
        3 * scale.nbytes,
    )


GROUPS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    "step": step_cases,
    "event": event_cases,
    "shares": share_cases,
    "log": log_cases,
    **{form.name: partial(level_cases, form) for form in FORMS},
    "unequal bits": unequal_cases,
    "elementwise": elementwise_cases,
    "rotated": rotated_cases,
    "inputs": inputs_cases,
    "none": split_cases,
    "window": window_cases,
    "centres": centre_cases,
    "weights": weight_cases,
    "states": state_cases,
}
"""All kernels, by what needs them. Groups share no tensors."""


def all_cases(setting: Setting) -> Iterator[Case]:
    """Those of all groups."""
    for group in GROUPS.values():
        yield from group(setting)
