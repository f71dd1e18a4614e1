"""What layers with windows, sinks and capped logits ask of the compiled kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_cpu import paged_attention
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.shares import Shares
from tests.kernels.cpu.test_cpu_attention import SCALE, Case, Shape, make

pytestmark = pytest.mark.compiler

LONG = Shape(heads=8, kv_heads=2, block=16, columns=200)


def windowed(case: Case, window: int) -> Case:
    """Each token sees its ``window`` newest entries; columns that no token of a row's chunk sees
    name no block, and what no token sees is NaN."""
    size, chunks = case.keys.shape[1], case.chunks
    first = (chunks.last - window + 1).clamp(min=0)
    for chunk, row in enumerate(chunks.rows.tolist()):
        tokens = slice(int(chunks.starts[chunk]), int(chunks.starts[chunk + 1]))
        for group in range(case.tables.shape[0]):
            for table in range(case.tables.shape[2]):
                least = int(first[group, table, tokens].min())
                block = int(case.tables[group, row, table, least // size])
                case.keys[block, : least % size] = case.values[block, : least % size] = torch.nan
                case.tables[group, row, table, : least // size] = 0
    return replace(case, chunks=replace(chunks, first=first))


def run(case: Case, **more: Any) -> torch.Tensor:
    return paged_attention(
        case.query, case.keys, case.values, case.tables, case.chunks, 0, SCALE, **more
    )


def expected(case: Case, **more: Any) -> torch.Tensor:
    chunks = case.chunks
    first = None if chunks.first is None else chunks.first[0]
    last = chunks.last[0]
    paged = QuerySegments(chunks.rows, last, int(last.max()) + 1, chunks.starts, first=first)
    clean = case.keys.nan_to_num(), case.values.nan_to_num()
    return paged_attention_torch(case.query, *clean, case.tables[0], paged, SCALE, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 5, 16, 100, 1024, 5000])
def test_windows(window: int, dtype: torch.dtype) -> None:
    case = windowed(make(LONG, [3, 1030, 2500, 64], [1, 1, 70, 64], dtype), window)
    within = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(run(case), expected(case), atol=within, rtol=within)


@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("window", [7, 1500, None])
def test_sinks_and_capped_logits(window: int | None, cap: float) -> None:
    case = make(LONG, [3, 1030, 2500, 0], [1, 1, 70, 3])
    if window is not None:
        case = windowed(case, window)
    how = {"sinks": torch.tensor([0.0, 1.0, -3.0, 200.0, -200.0, 4.0, 0.5, 2.0]), "soft_cap": cap}
    ours, theirs = (
        Shares(torch.empty(len(case.query), 8), torch.ones(len(case.query), dtype=torch.int64))
        for _ in range(2)
    )
    found, wanted = run(case, shares=ours, **how), expected(case, shares=theirs, **how)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    seen = theirs.out > -80  # beyond, the sink leaves nothing
    torch.testing.assert_close(ours.out[seen], theirs.out[seen], atol=1e-4, rtol=1e-4)
    assert (ours.out[~seen] < -80).all() and not found[-3:].any()


@pytest.mark.parametrize("window", [40, 1500])
def test_where_a_chunk_begins_to_read_changes_nothing(window: int) -> None:
    """Its first token sees entries that the others do not; in as few, sums are the same."""
    whole = windowed(make(replace(LONG, heads=2), [2500], [4]), window)
    chunks, sinks = whole.chunks, torch.tensor([0.5, -1.0])
    assert chunks.first is not None
    for token in range(4):
        at = slice(token, token + 1)
        last, first = (x[..., at].contiguous() for x in (chunks.last, chunks.first))
        own = replace(chunks, starts=torch.tensor([0, 1]), last=last, first=first)
        alone = run(replace(whole, query=whole.query[at], chunks=own), sinks=sinks)
        assert torch.equal(alone, run(whole, sinks=sinks)[at])
