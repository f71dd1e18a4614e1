"""The operators of a decoder layer, compiled and by Triton, against torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvserve.kernels.layer import elementwise as reference
from kvserve.kernels.layer import elementwise_cpu as compiled
from kvserve.kernels.layer import elementwise_triton
from tests.thinning import thinned

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter rounds to bfloat16 in its own way: that is for a GPU.
DTYPES = {
    "cpu": [torch.float32, torch.bfloat16],
    "triton": [torch.float32, torch.float16, *([torch.bfloat16] * torch.cuda.is_available())],
}
TOKENS = [0, 1, 5, 700]


KINDS = [
    pytest.param(kind, dtype, marks=[pytest.mark.compiler] if kind == "cpu" else [])
    for kind, dtypes in DTYPES.items()
    for dtype in dtypes
]
EACH = pytest.mark.parametrize(("kind", "dtype"), KINDS)
WIDTHS = thinned(
    {"kind,dtype": KINDS, "tokens": TOKENS, "width": [8, 48, 131, 1024]}, together=2, rest=False
)
pytestmark = pytest.mark.usefixtures("device")


def operator(kind: str, name: str) -> Any:
    if kind == "triton":
        return getattr(elementwise_triton, f"{name}_triton")
    return getattr(compiled, name)


def agrees(kind: str, name: str, *inputs: Any, within: float | None = None) -> None:
    """bfloat16 may be off by one rounding where float32 sums differ in their last bit."""
    found, expected = operator(kind, name)(*inputs), getattr(reference, name)(*inputs)
    within = TOLERANCE[expected.dtype] if within is None else within
    torch.testing.assert_close(found, expected, atol=within, rtol=within)


@WIDTHS
def test_norms(kind: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    x, added = 3 * torch.randn(2, tokens, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    agrees(kind, "rms_norm", x, weight, 1e-5)
    whole, normed = operator(kind, "add_rms_norm")(x, added, weight, 1e-5)
    assert torch.equal(whole, x + added)
    assert torch.equal(normed, operator(kind, "rms_norm")(whole, weight, 1e-5))
    if kind == "cpu":
        agrees(kind, "wide_rms_norm", x, weight.float(), 1e-5)


@EACH
def test_rms_norm_of_heads_within_a_wider_row(kind: str, dtype: torch.dtype) -> None:
    qkv, weight = torch.randn(5, 7, 32).to(dtype), torch.randn(32).to(dtype)
    for heads in (qkv[:, :3], qkv[:, 3:4]):
        agrees(kind, "rms_norm", heads, weight, 1e-6)


@EACH
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (3, 64), (5, 70)])
def test_rotate(kind: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    qkv, (cos, sin) = torch.randn(tokens, heads + 2, dim), torch.randn(2, tokens, 1, dim).to(dtype)
    exact = 0.0 if kind == "cpu" and dtype is torch.bfloat16 else None
    agrees(kind, "rotate", qkv.to(dtype)[:, :heads], cos, sin, within=exact)


@EACH
@pytest.mark.parametrize(("tokens", "width"), [(0, 37), (1, 1500), (5, 37), (700, 37)])
def test_activations(kind: str, tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(tokens, 2 * width + 3)).to(dtype)[:, : 2 * width]
    agrees(kind, "silu_and_mul", gate_up)
    if kind == "cpu":
        agrees(kind, "gelu_and_mul", gate_up)


@EACH
@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's
def test_silu_far_from_zero(kind: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, 0.0, 20.0, 200.0, 1e30]).to(dtype)
    gates = gates.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    agrees(kind, "silu_and_mul", torch.cat([gates, torch.ones_like(gates)])[None])


# ---- compiled alone -----------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES["cpu"])
@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("width", [1, 15, 48, 1003])
def test_argmax(rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 10, (rows, width + 5)).to(dtype)[:, :width]  # many are the largest
    x[1:3] = -torch.inf
    assert torch.equal(operator("cpu", "argmax")(x), reference.argmax(x))


@pytest.mark.compiler
def test_threads_change_no_bit(set_threads: Callable[[int], None]) -> None:
    activate, gate_up = operator("cpu", "silu_and_mul"), torch.randn(512, 2 * 256)
    alone = activate(gate_up)
    set_threads(3)
    assert torch.equal(activate(gate_up), alone)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES["cpu"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_sums_and_multiples(tokens: int, dtype: torch.dtype) -> None:
    """As torch rounds them; of heads within a wider row, too."""
    add, scale = operator("cpu", "add"), operator("cpu", "scale")
    x, added = 3 * torch.randn(2, tokens, 6 * 20, dtype=dtype)
    assert torch.equal(add(x, added), x + added)
    assert torch.equal(scale(x, 0.37), x * 0.37)
    heads = x.view(tokens, 6, 20)[:, 1:4]
    assert torch.equal(scale(heads, 12.0), heads * 12.0)
    with pytest.raises(ValueError, match="add"):
        add(x, added[:, :8])
    with pytest.raises(ValueError, match="wide_rms_norm"):
        operator("cpu", "wide_rms_norm")(x, torch.ones(120, dtype=torch.float64), 1e-5)


# ---- Triton alone -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("width", [37, 300])
def test_quantize_rows(tokens: int, width: int) -> None:
    """Of numbers that e4m3 has, at a scale of each row: the interpreter rounds others wrongly where
    a carry reaches the exponent, so those are for a GPU."""
    quantize = operator("triton", "quantize_rows")
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    values = every[torch.randint(len(every), (tokens, width))]
    values[:, :1] = 448.0
    x = values * 2.0 ** torch.randint(-3, 4, (tokens, 1))
    found, scales = quantize(torch.cat([x, torch.full((tokens, 3), 1e9)], dim=1)[:, :width])
    expected, right = reference.quantize_rows(x)
    assert torch.equal(found.float(), expected.float()) and torch.equal(found.float(), values)
    assert torch.equal(scales, right)
    nothing, scale = quantize(torch.zeros(1, width))
    assert not nothing.float().any()
    assert torch.equal(scale, reference.quantize_rows(torch.zeros(1, width))[1])


@pytest.mark.gpu
def test_quantize_rows_of_any_numbers() -> None:
    x = torch.randn(64, 4096).bfloat16() * torch.logspace(-6, 6, 64)[:, None].bfloat16()
    found = operator("triton", "quantize_rows")(x)
    for one, other in zip(found, reference.quantize_rows(x), strict=True):
        assert torch.equal(one.float(), other.float())
