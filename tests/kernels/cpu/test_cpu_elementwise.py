"""The compiled operators against torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels import elementwise as reference
from kvserve.kernels.cpu import elementwise as compiled
from tests.thinning import thinned

pytestmark = pytest.mark.compiler

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
TOKENS = [0, 1, 5, 700]
tokens = pytest.mark.parametrize("tokens", TOKENS)
EACH: dict[str, Sequence[Any]] = {"dtype": list(TOLERANCE), "tokens": TOKENS}


def assert_alike(one: Tensor, other: Tensor) -> None:
    """bfloat16 may be off by one rounding where float32 sums differ in their last bit."""
    tolerance = TOLERANCE[one.dtype]
    torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


@thinned({**EACH, "width": [8, 48, 131]}, together=2, rest=False)
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(tokens, width, dtype=dtype), torch.randn(width, dtype=dtype)
    assert_alike(compiled.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@dtypes
def test_rms_norm_of_heads_within_a_wider_row(dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(5, 4, 32, dtype=dtype), torch.randn(32, dtype=dtype)
    for heads in (qkv[:, :2], qkv[:, 2:3]):
        assert_alike(
            compiled.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6)
        )


@thinned({**EACH, "width": [8, 48, 131]}, together=2, rest=False)
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, added = 3 * torch.randn(2, tokens, width, dtype=dtype)
    weight = torch.randn(width, dtype=dtype)
    whole, normed = compiled.add_rms_norm(x, added, weight, 1e-5)
    assert torch.equal(whole, x + added)
    assert torch.equal(normed, compiled.rms_norm(whole, weight, 1e-5))


@thinned({**EACH, "width": [8, 32, 70]}, together=2, rest=False)
def test_rotate(tokens: int, width: int, dtype: torch.dtype) -> None:
    qkv = torch.randn(tokens, 4, width, dtype=dtype)
    cos, sin = torch.randn(2, tokens, 1, width, dtype=dtype)
    torch.testing.assert_close(
        compiled.rotate(qkv[:, :3], cos, sin),
        reference.rotate(qkv[:, :3], cos, sin),
        atol=1e-6 if dtype == torch.float32 else 0,
        rtol=0,
    )


@dtypes
@tokens
def test_silu_and_mul(tokens: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(tokens, 2 * 37, dtype=dtype)
    assert_alike(compiled.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@dtypes
def test_silu_far_from_zero(dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30], dtype=dtype)
    gate_up = torch.cat([gates, torch.ones_like(gates)])[None]
    assert_alike(compiled.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("width", [1, 15, 48, 1003])
def test_argmax(rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 10, (rows, width + 5)).to(dtype)[:, :width]  # many are the largest
    x[1:3] = -torch.inf
    assert torch.equal(compiled.argmax(x), reference.argmax(x))


def test_threads_change_no_bit() -> None:
    gate_up, before = torch.randn(512, 2 * 256), torch.get_num_threads()
    alone = compiled.silu_and_mul(gate_up)
    try:
        torch.set_num_threads(3)
        assert torch.equal(compiled.silu_and_mul(gate_up), alone)
    finally:
        torch.set_num_threads(before)


@thinned({**EACH, "width": [8, 48, 131]}, together=2, rest=False)
def test_wide_rms_norm(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(tokens, width).to(dtype), torch.randn(width)
    assert_alike(compiled.wide_rms_norm(x, weight, 1e-5), reference.wide_rms_norm(x, weight, 1e-5))
    with pytest.raises(ValueError, match="wide_rms_norm"):
        compiled.wide_rms_norm(x, weight.double(), 1e-5)


@thinned({**EACH, "width": [8, 32, 70]}, together=2, rest=False)
def test_gelu_and_mul(tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (2 * torch.randn(tokens, 2 * width)).to(dtype)
    assert_alike(compiled.gelu_and_mul(gate_up), reference.gelu_and_mul(gate_up))


@dtypes
@tokens
def test_sums_and_multiples(tokens: int, dtype: torch.dtype) -> None:
    """As torch rounds them; of heads within a wider row, too."""
    x, added = 3 * torch.randn(2, tokens, 6 * 20, dtype=dtype)
    assert torch.equal(compiled.add(x, added), x + added)
    assert torch.equal(compiled.scale(x, 0.37), x * 0.37)
    heads = x.view(tokens, 6, 20)[:, 1:4]
    assert torch.equal(compiled.scale(heads, 12.0), heads * 12.0)
    with pytest.raises(ValueError, match="add"):
        compiled.add(x, added[:, :8])
