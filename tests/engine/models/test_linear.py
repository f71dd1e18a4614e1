"""Matrix products over weights that were laid out for the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.models import linear as module
from kvserve.engine.models.linear import linear, packed, select_product
from kvserve.kernels.cpu.linear import Panels
from tests.thinning import thinned

DTYPES = [torch.float32, torch.bfloat16]


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(outputs, inputs).to(dtype), requires_grad=False)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.compiler
@thinned(
    {
        "threads": [1, 2],
        "dtype": DTYPES,
        "with_bias": [False, True],
        "tokens": [0, 1, 5, 6, 7, 15, 17, 33, 64, 1000],
        "outputs,inputs": [
            *((64, 48), (200, 258), (1, 2), (65, 700), (70, 30), (64, 32), (130, 66)),
        ],
    },
    together=2,
    rest=False,
)
def test_panels_multiply_like_plain_weights(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, threads: int, *, with_bias: bool
) -> None:
    weight = weight_of(outputs, inputs, dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    x = torch.randn(tokens, 2 * inputs).to(dtype)[:, inputs:]  # rows that lie apart
    wanted = exact(x, weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = linear(x, packed(weight, "compiled"), bias)
    finally:
        torch.set_num_threads(before)
    error = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(product.double(), wanted, atol=error * inputs**0.5, rtol=error)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_neither_others_nor_threads(dtype: torch.dtype) -> None:
    x, panels = torch.randn(777, 256).to(dtype), packed(weight_of(320, 256, dtype), "compiled")
    together = linear(x, panels)
    for rows in (slice(0, 1), slice(3, 9), slice(100, 117), slice(0, 776)):
        assert torch.equal(linear(x[rows], panels), together[rows])
    before = torch.get_num_threads()
    torch.set_num_threads(3 if before != 3 else 1)
    try:
        assert torch.equal(linear(x, panels), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.compiler
@pytest.mark.parametrize("outputs", [64 * 10, 64 * 10 + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_weights_are_laid_out_piece_by_piece_in_place(
    dtype: torch.dtype, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserve.kernels.cpu.linear._PIECE", 3 * 64 * 32)
    weight, x = weight_of(outputs, 32, dtype), torch.randn(5, 32).to(dtype)
    wanted, address = exact(x, weight, None), weight.data_ptr()
    panels = packed(weight, "compiled")
    assert isinstance(panels, Panels)
    assert (panels.data_ptr() == address) == (outputs % 64 == 0)
    error = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(linear(x, panels).double(), wanted, atol=error * 32**0.5, rtol=error)


@pytest.mark.compiler
def test_a_copied_weight_keeps_its_shape() -> None:
    panels = packed(weight_of(70, 32), "compiled")
    one, same = copy.deepcopy([panels, panels])
    assert one is same is not panels and isinstance(one, Panels)
    x = torch.randn(3, 32)
    assert torch.equal(linear(x, one), linear(x, panels)) and linear(x, one).shape == (3, 70)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
@pytest.mark.parametrize("tokens", [0, 1, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_onednn_multiplies_like_plain_weights(tokens: int, *, with_bias: bool) -> None:
    x, weight = torch.randn(tokens, 48), weight_of(80, 48)
    bias = torch.randn(80) if with_bias else None
    product = linear(x, packed(weight, "oneDNN"), bias)
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.compiler
def test_amx_is_preferred_where_the_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was compiled for other CPUs leaves it to oneDNN."""
    if not module.compiled.has_tiles():
        pytest.skip("no AMX here, or not for this process")
    assert select_product(torch.bfloat16, "cpu")[1].endswith("multiplied by AMX")
    assert "AMX" not in select_product(torch.float32, "cpu")[1]
    monkeypatch.setattr(module.compiled, "has_tiles", lambda: False)
    assert select_product(torch.bfloat16, "cpu")[0] == "oneDNN"


def test_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, device in ((torch.float32, "cuda"), (torch.float16, "cpu")):
        assert select_product(dtype, device)[0] == "torch"

    monkeypatch.setattr(module, "why_missing", lambda name: "no g++ found")
    product, reason = select_product(torch.float32, "cpu")
    assert product == ("oneDNN" if torch.backends.mkldnn.is_available() else "torch")
    assert "no g++ found" in reason
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        product, reason = select_product(torch.bfloat16, "cpu")
        assert product == "oneDNN" and reason.startswith("multiplies bfloat16 with AMX")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for dtype in DTYPES:
        assert select_product(dtype, "cpu")[0] == "torch"
