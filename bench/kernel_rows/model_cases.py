"""Cases of contexts in parts, of layers with windows and sinks, and of scores by where queries
point."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, cases
from bench.kernel_rows.stored_cases import chunks_of, kinds_of, stored_cases
from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.scores.centre_scores import (
    OFFSETS,
    centre_scores_by_head,
    centre_scores_triton,
)


def all_cases(setting: Setting) -> Iterator[Case]:
    """Those of ``cases`` and ``stored_cases``, then these."""
    yield from cases(setting)
    cache, tables = setting.cache()
    yield from stored_cases(setting, cache, tables)
    yield from split_cases(setting, cache, tables)
    yield from window_cases(setting, cache, tables)
    yield from centre_cases(setting)


def split_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    """Attention as under ``none``; decoding in three parts."""
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


def window_cases(setting: Setting, cache: Tensor, tables: Tensor) -> Iterator[Case]:
    """Tokens that see the newest third of the context, a sink for each head, and capped logits."""
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
