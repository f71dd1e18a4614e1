"""A context that is attended to in parts gives what it gives as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS
from tests.kernels.coded_case import coded_case
from tests.kernels.paged_case import (
    TOLERANCE,
    LevelRows,
    Shape,
    by_triton,
    make,
    random_remainder,
    windowed,
)
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


def plain(shape: Shape, dtype: torch.dtype, chunks: tuple[int, ...] = ()) -> Inputs:
    held, lengths = ([70, 21], chunks) if chunks else ([70, 0, 3, 33], [1] * 4)
    return make(shape, held, lengths, dtype).inputs(), {}


def with_everything(tables: int, chunks: tuple[int, int] = (1, 1)) -> Inputs:
    """Shares, a remainder, sinks and capped logits."""
    case = make(Shape(heads=6, dim=32, block=16, tables=tables), [70, 40], chunks)
    left = random_remainder(len(case.tables[0]), 2, 32)
    more = {"remainder": left, "sinks": torch.randn(6), "soft_cap": 1.5}
    return case.inputs(), {"shares": case.shares(4), **more}


def in_a_window() -> Inputs:
    shape = Shape(heads=8, dim=64, block=16)
    case = make(shape, [70, 4, 3, 33], [1] * 4, torch.float16)
    return windowed(case, 20).inputs(), {"sinks": torch.randn(8)}


def of_codes() -> Inputs:
    case = coded_case([[37, 40], [30, 9]], [[32, 12], [0, 4]], [1, 1])
    return case.inputs, {"codes": case.codes}


def of_levels(form: str) -> Inputs:
    return LevelRows(FORMATS[form], 64, torch.float32, held=(40, 21)).inputs([1, 1]), {}


CASES: dict[str, Callable[[], Inputs]] = {
    "float16": partial(plain, Shape(heads=8, dim=64, block=16), torch.float16),
    "seven queries": partial(plain, Shape(heads=14, dim=128, block=32, tables=2), torch.float32),
    "one query": partial(plain, Shape(heads=2, dim=32, block=5, columns=14), torch.float32),
    "chunks": partial(plain, Shape(heads=2, kv_heads=1, dim=32, block=16), torch.float32, (3, 7)),
    "everything": partial(with_everything, 1),
    "everything, heads apart": partial(with_everything, 2),
    "everything, chunks": partial(with_everything, 1, (3, 1)),
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
    out = by_triton(*inputs, **how)
    return [out, more["shares"].out.clone()] if "shares" in more else [out]


@thinned({"case": list(CASES), "num_splits": [2, 4, 19]})
def test_parts_add_up_to_the_whole(case: str, num_splits: int) -> None:
    """And what no program has written is not read."""
    given = CASES[case]()
    for one, whole in zip(results(given, num_splits), results(given, 1), strict=True):
        assert torch.isfinite(one).all()
        within = TOLERANCE[one.dtype]
        torch.testing.assert_close(one, whole, atol=within, rtol=within)
