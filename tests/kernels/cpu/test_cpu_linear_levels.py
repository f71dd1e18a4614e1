"""Compiled products with weights held as levels, beside what the levels stand for in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvserve.kernels.layer.weight_levels import Levels, rounded
from kvserve.kernels.layer.weight_levels_cpu import LevelPanels
from tests.kernels.weight_level_cases import FORMS, random_levels

pytestmark = pytest.mark.compiler
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(64, 128), (70, 96), (200, 320), (33, 90), (1, 2)]
ROWS = [0, 1, 5, 7, 33, 250]


def exact(x: Tensor, weight: Levels) -> Tensor:
    wide = rounded(x) if weight.form.rounds else x
    return wide.double() @ weight.numbers(slice(None)).double().T


def check(found: Tensor, x: Tensor, weight: Levels, bias: Tensor | float = 0.0) -> None:
    """Within rounding of the sum of what is added."""
    numbers = weight.numbers(slice(None)).double()
    terms = x.double().abs() @ numbers.abs().T + torch.as_tensor(bias).abs()
    within = (2e-6 if x.dtype is torch.float32 else 2**-7) * terms
    assert found.dtype is x.dtype and found.shape == terms.shape
    assert ((found.double() - exact(x, weight) - bias).abs() <= within).all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_products(form: str, dtype: torch.dtype, *, ordered: bool) -> None:
    for outputs, width in SHAPES:
        weight = random_levels(FORMS[form], outputs, width, dtype, ordered=ordered)
        panels = LevelPanels(copy.deepcopy(weight))
        for count in ROWS:
            x = torch.randn(count, 2 * width).to(dtype)[:, width:]  # rows that lie apart
            bias = torch.randn(outputs).to(dtype)
            check(panels.linear(x), x, weight)
            check(panels.linear(x, bias), x, weight, bias)


@pytest.mark.parametrize("form", FORMS)
def test_experts(form: str) -> None:
    weight = random_levels(FORMS[form], 70, 90, experts=4, ordered=form == "Q4_0")
    panels = LevelPanels(copy.deepcopy(weight))
    x, ends = torch.randn(41, 90), torch.tensor([3, 3, 30, 41], dtype=torch.int32)
    found = panels.expert_linear(x, ends)
    first = 0
    for expert, last in enumerate(ends.tolist()):
        own = weight[expert]
        check(found[first:last], x[first:last], own)
        first = last
    with pytest.raises(ValueError, match="do not divide 40 rows"):
        panels.expert_linear(x[:40], ends)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["Q4_1", "4 bits and zeros", "Q8_0", "FP8"])
def test_a_row_depends_on_neither_others_nor_threads(
    form: str, dtype: torch.dtype, set_threads: Callable[[int], None]
) -> None:
    panels = LevelPanels(random_levels(FORMS[form], 320, 256, dtype))
    x = torch.randn(777, 256).to(dtype)
    together = panels.linear(x)
    for some in (slice(0, 1), slice(5, 9), slice(100, 300), slice(776, 777)):
        assert torch.equal(panels.linear(x[some]), together[some])
    set_threads(2)
    assert torch.equal(panels.linear(x), together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q8_0", "FP8", "4 bits and zeros"])
def test_rows_of_a_table(form: str, dtype: torch.dtype) -> None:
    weight = random_levels(FORMS[form], 130, 96, dtype)
    panels, places = LevelPanels(copy.deepcopy(weight)), torch.tensor([129, 0, 64, 64, 17])
    found = panels.take_rows(places).float()
    error = 2e-6 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found, weight.numbers(places), atol=1e-6, rtol=error)
    with pytest.raises(IndexError, match="row 130 of a table of 130"):
        panels.take_rows(torch.tensor([3, 130]))
