"""Matrix products over weights that were laid out for the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from kvserve.config import ModelConfig
from kvserve.engine.device.shared_group import SharedGroup
from kvserve.engine.models import linear as module
from kvserve.engine.models.linear import linear, packed, select_product, take_rows
from kvserve.engine.models.loader import load_model
from kvserve.kernels.layer.linear_cpu import Panels
from tests.checkpoints import read_spec, write_checkpoint
from tests.thinning import thinned

DTYPES = [torch.float32, torch.bfloat16]


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


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
    with num_threads(threads):
        product = linear(x, packed(weight, "compiled"), bias)
    error = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(product.double(), wanted, atol=error * inputs**0.5, rtol=error)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_neither_others_nor_threads(dtype: torch.dtype) -> None:
    x, panels = torch.randn(777, 256).to(dtype), packed(weight_of(320, 256, dtype), "compiled")
    together = linear(x, panels)
    for rows in (slice(0, 1), slice(3, 9), slice(100, 117), slice(0, 776)):
        assert torch.equal(linear(x[rows], panels), together[rows])
    with num_threads(3):
        assert torch.equal(linear(x, panels), together)


@pytest.mark.compiler
@pytest.mark.parametrize("outputs", [64 * 10, 64 * 10 + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_weights_are_laid_out_piece_by_piece_in_place(
    dtype: torch.dtype, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserve.kernels.layer.linear_cpu._PIECE", 3 * 64 * 32)
    weight, x = weight_of(outputs, 32, dtype), torch.randn(5, 32).to(dtype)
    wanted, address = exact(x, weight, None), weight.data_ptr()
    panels = packed(weight, "compiled")
    assert isinstance(panels, Panels)
    assert (panels.data_ptr() == address) == (outputs % 64 == 0)
    error = 4e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(linear(x, panels).double(), wanted, atol=error * 32**0.5, rtol=error)


@pytest.mark.compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_panels_are_those_of_the_table(dtype: torch.dtype, threads: int) -> None:
    for rows, width in ((1, 2), (64, 48), (130, 258), (777, 576)):
        table, places = weight_of(rows, width, dtype), torch.randint(rows, (500,))
        expected = table[places]
        with num_threads(threads):
            assert torch.equal(take_rows(packed(table, "compiled"), places, F.embedding), expected)
    panels = packed(weight_of(130, 48, dtype), "compiled")
    for row in (130, -1):
        with pytest.raises(IndexError, match=f"row {row} of a table of 130"):
            take_rows(panels, torch.tensor([3, row]), F.embedding)
    with pytest.raises(ValueError, match="int32"):
        take_rows(panels, torch.tensor([3], dtype=torch.int32), F.embedding)


@pytest.mark.compiler
@pytest.mark.parametrize("product", ["compiled", "oneDNN", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama-mha-tied", "gemma3"])
def test_a_tied_model_looks_up_what_its_table_holds(
    kind: str, dtype: torch.dtype, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, whatever multiplies, on one rank and on each of three: the last has a row."""
    if product == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN")
    monkeypatch.setattr("kvserve.engine.models.loader.select_product", lambda *_: (product, ""))
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    write_checkpoint(kind, tmp_path, vocab_size=129, **sizes)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    ids = torch.tensor([128, 0, 7, 7, 63, 64, 127])
    for size in (1, 3):
        parts = []
        for rank in range(size):
            group = Apart(rank, size)
            model = load_model(tmp_path, ModelConfig(), read_spec(tmp_path), dtype, "cpu", group)
            assert (model.head is model.embedding) == (product != "oneDNN")
            parts.append(model.embed(ids))
        expected = F.embedding(ids, table)
        if model.embedding_scale != 1.0:
            expected = expected * model.embedding_scale
        assert torch.equal(torch.stack(parts).sum(0), expected)


class Apart(SharedGroup):
    """One of several ranks that are not there."""

    def sum(self, x: Tensor) -> Tensor:
        return x


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
