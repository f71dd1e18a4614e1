"""The Triton operators of a decoder layer against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels import elementwise as reference
from kvserve.kernels.elementwise import (
    add_rms_norm_triton,
    quantize_rows_triton,
    rms_norm_triton,
    rotate_triton,
    silu_and_mul_triton,
)
from tests.thinning import thinned

# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] * torch.cuda.is_available())]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOKENS = [0, 1, 5]
tokens = pytest.mark.parametrize("tokens", TOKENS)
EACH: dict[str, Sequence[Any]] = {"dtype": DTYPES, "tokens": TOKENS}


def assert_alike(one: Tensor, other: Tensor) -> None:
    tolerance = TOLERANCE[one.dtype]
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@thinned({**EACH, "width": [8, 48, 131, 1024]}, rest=False)
def test_rms_norm(device: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(tokens, width), torch.randn(width)
    x, weight = x.to(dtype), weight.to(dtype)
    assert_alike(rms_norm_triton(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@dtypes
def test_rms_norm_of_heads_within_a_wider_row(device: str, dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(5, 7, 32).to(dtype), torch.randn(32).to(dtype)
    for heads in (qkv[:, :3], qkv[:, 3:4]):
        assert_alike(rms_norm_triton(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@thinned({**EACH, "width": [8, 48, 131, 1024]}, rest=False)
def test_add_rms_norm(device: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x, added, weight = torch.randn(tokens, width), torch.randn(tokens, width), torch.randn(width)
    x, added, weight = x.to(dtype), added.to(dtype), weight.to(dtype)
    whole, normed = add_rms_norm_triton(x, added, weight, 1e-5)
    assert torch.equal(whole, x + added)
    assert torch.equal(normed, rms_norm_triton(whole, weight, 1e-5))


@thinned({**EACH, "heads,dim": [(1, 8), (3, 64), (5, 70)]}, rest=False)
def test_rotate(device: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(tokens, heads + 2, dim).to(dtype)
    cos, sin = torch.randn(2, tokens, 1, dim).to(dtype)
    assert_alike(
        rotate_triton(qkv[:, :heads], cos, sin), reference.rotate(qkv[:, :heads], cos, sin)
    )


@thinned({**EACH, "width": [37, 1500]}, rest=False)
def test_silu_and_mul(device: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(tokens, 2 * width + 3)).to(dtype)[:, : 2 * width]
    assert_alike(silu_and_mul_triton(gate_up), reference.silu_and_mul(gate_up))


@tokens
@pytest.mark.parametrize("width", [37, 300])
def test_quantize_rows(device: str, tokens: int, width: int) -> None:
    """Of numbers that e4m3 has, at a scale of each row: the interpreter rounds others wrongly where
    a carry reaches the exponent, so those are for a GPU."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    values = every[torch.randint(len(every), (tokens, width))]
    values[:, :1] = 448.0
    x = values * 2.0 ** torch.randint(-3, 4, (tokens, 1))
    x = torch.cat([x, torch.full((tokens, 3), 1e9)], dim=1)[:, :width]
    found, scales = quantize_rows_triton(x)
    expected, right = reference.quantize_rows(x)
    assert torch.equal(found.float(), expected.float()) and torch.equal(found.float(), values)
    assert torch.equal(scales, right)
    nothing, scale = quantize_rows_triton(torch.zeros(1, width))
    assert (
        not nothing.float().any()
        and scale.item() == reference.quantize_rows(torch.zeros(1, width))[1].item()
    )


@pytest.mark.gpu
def test_quantize_rows_of_any_numbers(device: str) -> None:
    x = torch.randn(64, 4096).bfloat16() * torch.logspace(-6, 6, 64)[:, None].bfloat16()
    for one, other in zip(quantize_rows_triton(x), reference.quantize_rows(x), strict=True):
        assert torch.equal(one.float(), other.float())


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's
def test_silu_far_from_zero(device: str) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30])
    gate_up = torch.cat([gates, torch.ones_like(gates)])[None]
    assert_alike(silu_and_mul_triton(gate_up), reference.silu_and_mul(gate_up))
