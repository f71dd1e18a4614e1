"""What layers with windows, sinks and capped logits ask of the Triton kernel."""

from __future__ import annotations

import pytest
import torch

from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares
from tests.kernels.on_triton.test_triton_paged_attention import TOLERANCE, Case
from tests.thinning import thinned

pytestmark = pytest.mark.usefixtures("device")


def windowed(case: Case, window: int) -> QuerySegments:
    """Each token sees its ``window`` newest entries; freed columns name no block."""
    size, last = case.keys.shape[1], case.last
    first = (last - window + 1).clamp(min=0).int().contiguous()
    for chunk in range(len(case.rows)):
        for table in range(len(first)):
            least = int(first[table, case.owner == chunk].min())
            case.tables[case.rows[chunk], table, : least // size] = 0
    most = int(last.max()) + 1
    return QuerySegments(case.rows, last, most, case.starts, case.max_chunk, first)


SHAPES = [
    (1, 2, 4, 64, 16, torch.float16, None),
    (2, 1, 3, 32, 64, torch.float32, None),
    (1, 2, 2, 32, 16, torch.float32, [40, 1, 3, 33]),
    (1, 1, 4, 32, 64, torch.float32, [70, 2, 3, 65]),
]


@thinned({"shape": SHAPES, "window": [1, 20, 100], "num_splits": [1, 3]})
def test_windows(shape: tuple, window: int, num_splits: int) -> None:
    *sizes, chunks = shape
    case = Case(*(*sizes, [110, 2, 3, 65], chunks))
    q, keys, values, tables, _, scale = case.inputs
    how = q, keys, values, tables, windowed(case, window), scale
    within = TOLERANCE[q.dtype]
    found = paged_attention_triton(*how, num_splits)
    torch.testing.assert_close(found, paged_attention_torch(*how), atol=within, rtol=within)


@thinned({"window": [30, None], "cap": [0.0, 1.5], "num_splits": [1, 3]})
def test_sinks_and_capped_logits(window: int | None, cap: float, num_splits: int) -> None:
    case = Case(1, 2, 2, 32, 16, torch.float32, [110, 0, 3, 65], [40, 1, 3, 33])
    q, keys, values, tables, chunks, scale = case.inputs
    if window is not None:
        chunks = windowed(case, window)
    more = torch.randn(2, len(tables), 2, 32)
    left = Remainder(more[0], more[1], torch.tensor([[1.0, -torch.inf]]).repeat(len(tables), 1))
    told = [Shares(torch.empty(len(q), 4), torch.full((len(q),), 2)) for _ in range(2)]
    sinks = torch.tensor([0.5, -2.0, 40.0, -300.0])
    more_of_it = left if window is None else None, sinks, cap
    given = q, keys, values, tables, chunks, scale
    found = paged_attention_triton(*given, num_splits, None, told[0], *more_of_it)
    wanted = paged_attention_torch(*given, None, told[1], *more_of_it)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(told[0].out, told[1].out, atol=1e-4, rtol=1e-4)
