"""A context that is attended to in parts gives what it gives as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.shares import Shares
from tests.kernels.coded_case import coded_case
from tests.kernels.on_triton.test_triton_paged_attention import TOLERANCE, Case
from tests.kernels.on_triton.test_triton_quantized import Rows
from tests.kernels.on_triton.test_triton_windows import windowed
from tests.kernels.test_remainder import random_remainder
from tests.thinning import thinned

Inputs = tuple[Any, dict[str, Any]]
"""What attention takes, without and with names."""


@pytest.fixture(autouse=True)
def unwritten(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no program has written is nan."""
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = empty(x, *shape, **options)
        return torch.full_like(made, torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def plain(*sizes: Any, chunks: list[int] | None = None) -> Inputs:
    lengths = [70, 0, 3, 33] if chunks is None else [70, 21]
    return Case(*(*sizes, lengths, chunks)).inputs, {}


def with_everything(tables: int, chunks: list[int] | None = None) -> Inputs:
    """Shares, a remainder, sinks and capped logits."""
    heads = 2 // tables
    case = Case(tables, heads, 3, 32, 16, torch.float32, [70, 40], chunks)
    left = random_remainder(len(case.tables), 2, 32, 1)
    recent = torch.full((len(case.q),), 4)
    more = {"remainder": left, "sinks": torch.randn(6), "soft_cap": 1.5}
    return case.inputs, {"shares": Shares(torch.empty(case.q.shape[:2]), recent), **more}


def in_a_window() -> Inputs:
    case = Case(1, 2, 4, 64, 16, torch.float16, [70, 2, 3, 33])
    q, keys, values, tables, _, scale = case.inputs
    return (q, keys, values, tables, windowed(case, 20), scale), {"sinks": torch.randn(8)}


def of_codes() -> Inputs:
    case = coded_case([[37, 40], [30, 9]], [[32, 12], [0, 4]], [1, 1])
    chunks = QuerySegments(case.rows, case.last, int(case.last.max()) + 1)
    return (case.q, case.keys, case.values, case.tables, chunks, 0.3), {"codes": case.codes}


def of_levels(form: str) -> Inputs:
    return Rows(FORMATS[form], 1, 2, torch.float32).arguments([1, 1]), {}


CASES: dict[str, Callable[[], Inputs]] = {
    "float16": partial(plain, 1, 2, 4, 64, 16, torch.float16),
    "seven queries": partial(plain, 2, 1, 7, 128, 32, torch.float32),
    "one query": partial(plain, 1, 2, 1, 32, 5, torch.float32),
    "chunks": partial(plain, 1, 1, 2, 32, 16, torch.float32, chunks=[3, 7]),
    "everything": partial(with_everything, 1),
    "everything, heads apart": partial(with_everything, 2),
    "everything, chunks": partial(with_everything, 1, [3, 1]),
    "window": in_a_window,
    "codes": of_codes,
    "int8": partial(of_levels, "int8"),
    "k8v4": partial(of_levels, "k8v4"),
    "k4v4": partial(of_levels, "k4v4"),
}


def results(given: Inputs, num_splits: int) -> list[Tensor]:
    """The means, and shares if asked for."""
    inputs, more = given
    how: dict[str, Any] = more | {"num_splits": num_splits}
    out = paged_attention_triton(*inputs, **how)
    return [out, more["shares"].out.clone()] if "shares" in more else [out]


@thinned({"case": list(CASES), "num_splits": [2, 4, 19]})
def test_parts_add_up_to_the_whole(case: str, num_splits: int) -> None:
    """And what no program has written is not read."""
    given = CASES[case]()
    for one, whole in zip(results(given, num_splits), results(given, 1), strict=True):
        assert torch.isfinite(one).all()
        within = TOLERANCE[one.dtype]
        torch.testing.assert_close(one, whole, atol=within, rtol=within)
