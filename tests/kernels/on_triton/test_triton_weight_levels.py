"""Triton's products with weights held as levels, beside the torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.kernels import dispatch
from kvserve.kernels.layer import weight_levels_triton
from kvserve.kernels.layer.weight_levels import expert_linear_levels, linear_levels
from kvserve.kernels.layer.weight_levels_triton import (
    WIDENED_ROWS,
    expert_linear_levels_triton,
    linear_levels_triton,
    widen_triton,
)
from tests.kernels.weight_level_cases import FORMS, random_levels

# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] * torch.cuda.is_available())]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def assert_alike(one: Tensor, other: Tensor) -> None:
    assert one.shape == other.shape and one.dtype is other.dtype
    if one.numel():
        apart = (one.double() - other.double()).norm() / other.double().norm()
        assert apart < TOLERANCE[one.dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(device: str, form: str, dtype: torch.dtype) -> None:
    for outputs, width, rows, ordered in ((70, 90, 5, True), (33, 160, 20, False)):
        weight = random_levels(FORMS[form], outputs, width, dtype, ordered=ordered)
        x = torch.randn(rows, 2 * width).to(dtype)[:, width:]
        bias = torch.randn(outputs).to(dtype) if ordered else None
        assert_alike(linear_levels_triton(x, weight, bias), linear_levels(x, weight, bias))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_tiles_of_large_matrices(
    device: str, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many outputs that each multiprocessor has a tile of 128, or for few rows as many."""
    weight = random_levels(FORMS[form], 150, 160, dtype)
    x = torch.randn(WIDENED_ROWS - 1, 160).to(dtype)
    products = []
    for rows in (3, 40, 128):
        small = linear_levels_triton(x[:rows], weight)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "num_processors", lambda _: 1)
            products.append(linear_levels_triton(x[:rows], weight))
        assert_alike(products[-1], linear_levels(x[:rows], weight))
        if device == "cuda":  # numpy's sums have orders of their own
            assert torch.equal(products[-1], small)
    if device == "cuda":
        assert torch.equal(products[2][:40], products[1])


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_weight_is_widened_for_many_rows(
    device: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outputs, width, ordered in ((70, 90, True), (33, 160, False)):
        weight = random_levels(FORMS[form], outputs, width, ordered=ordered)
        numbers = weight.numbers(slice(None))
        torch.testing.assert_close(widen_triton(weight, torch.float32), numbers, rtol=1e-6, atol=0)
        x, bias = torch.randn(WIDENED_ROWS, width), torch.randn(outputs)
        expected = linear_levels(x, weight, bias)
        for at_once in (2**27, 32 * width):
            monkeypatch.setattr(weight_levels_triton, "_WIDENED_AT_ONCE", at_once)
            assert_alike(linear_levels_triton(x, weight, bias), expected)


@pytest.mark.parametrize("form", ["Q4_1", "4 bits and zeros", "FP8", "W8A8"])
def test_experts(device: str, form: str) -> None:
    weight = random_levels(FORMS[form], 40, 90, experts=3, ordered=form != "FP8")
    x = torch.randn(41, 90)
    for ends in ([3, 3, 41], [0, 20, 41], [41, 41, 41]):
        found = torch.tensor(ends, dtype=torch.int32)
        assert_alike(
            expert_linear_levels_triton(x, weight, found), expert_linear_levels(x, weight, found)
        )


def test_no_rows_and_what_does_not_fit(device: str) -> None:
    weight = random_levels(FORMS["Q4_0"], 40, 64)
    assert linear_levels_triton(torch.randn(0, 64), weight).shape == (0, 40)
    with pytest.raises(ValueError, match="does not fit levels"):
        linear_levels_triton(torch.randn(2, 65), weight)
    with pytest.raises(ValueError, match="bias"):
        linear_levels_triton(torch.randn(2, 64), weight, torch.randn(41))
    with pytest.raises(ValueError, match="ends"):
        expert_linear_levels_triton(torch.randn(2, 64), weight, torch.tensor([2]))
