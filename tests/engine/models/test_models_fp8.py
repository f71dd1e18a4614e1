"""FP8 weights as they are stored. A CPU multiplies them by the operator that a GPU would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.engine.models import held, loader
from kvserve.engine.models.level_products import FP8, can_multiply_fp8, multiply_fp8
from kvserve.kernels.layer.weight_levels import Levels
from tests.checkpoints import edited_tensors, random_prompts
from tests.engine.models.decoding import make, row_of, tokens
from tests.engine.recorder import Recorder
from tests.quantized_checkpoints import fp8_config, quantize

MATRICES = "qkv", "out", "gate_up", "down"


@pytest.fixture
def multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine passes for one that multiplies FP8."""
    monkeypatch.setattr(held, "can_multiply_fp8", lambda dtype, *_: dtype == torch.bfloat16)
    monkeypatch.setattr(loader, "select_product", lambda *_: ("torch", ""))


@pytest.mark.compiler
@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [("llama", "tensor"), ("qwen2", "channel"), ("internlm2", "tensor"), ("internlm2", "channel")],
)
def test_weights_are_held_as_they_are_stored(kind: str, strategy: str, tmp_path: Path) -> None:
    plain = make(quantize(kind, tmp_path, fp8_config(strategy)))
    fp8 = make(tmp_path, dtype="bfloat16")
    of_levels, of_numbers = (llm.engine.core.runner.model.layers for llm in (fp8, plain))
    meant = dict(of_numbers.named_parameters())
    matrices = {n: m for n, m in of_levels.named_modules() if isinstance(m, Levels)}
    assert len(matrices) == 4 * len(of_levels)
    for name, matrix in matrices.items():
        values, scales = matrix.levels.data.view(FP8), matrix.scales.data
        assert name.endswith(MATRICES) and scales.shape == (len(values), 1)
        torch.testing.assert_close(values.float() * scales, meant[name].data, atol=0.0, rtol=1e-6)
    recorders = [Recorder(llm) for llm in (fp8, plain)]
    for recorder in recorders:
        tokens(recorder.llm, random_prompts([40]), 1)
    found, expected = (recorder.logits[0][0] for recorder in recorders)
    assert F.cosine_similarity(found, expected, dim=0) > 0.9  # random weights amplify what is lost
    assert row_of(fp8, "weights")[1:] == (
        "FP8, else bfloat16, from compressed-tensors",
        "as stored; x is rounded to 8 bits too, at a scale per token",
    )


def test_products_are_those_of_the_rounded_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[1e-3], [1.0], [50.0], [1e4], [0.0]])
    x = (torch.randn(5, 64, generator=generator) * sizes).bfloat16()
    weight = torch.randn(32, 64, generator=generator).to(FP8)
    scales = torch.rand(32, 1, generator=generator)
    x[2, 3] = 1000.0  # beside it, small numbers lose digits

    def rounded(row: Tensor) -> np.ndarray[Any, Any]:
        scale = max(float(row.abs().max()), 1e-12) / 448
        numbers: np.ndarray[Any, Any] = (row.double() / scale).to(FP8).double().numpy() * scale
        return numbers

    expected = np.stack([rounded(row) for row in x]) @ (weight.double() * scales.double()).T.numpy()
    found = multiply_fp8(x, weight, scales)
    assert found.dtype is torch.bfloat16 and not found[4].any()
    error = np.abs(found.double().numpy() - expected)
    assert (error <= 2**-8 * np.abs(expected).max(axis=1, keepdims=True)).all()


@pytest.mark.compiler
@pytest.mark.usefixtures("multiplies")
@pytest.mark.parametrize("change", ["static", "none", "mixed", "float32"])
def test_others_are_multiplied_as_they_are(change: str, tmp_path: Path) -> None:
    """Activations that are to be rounded otherwise, or not at all; and other dtypes."""
    config = fp8_config()
    if change in ("static", "none"):
        group: Any = config["config_groups"]
        group["group_0"]["input_activations"] = {"dynamic": False} if change == "static" else None
    quantize("llama", tmp_path, config)
    if change == "mixed":
        name = "model.layers.0.mlp.up_proj.weight"
        with edited_tensors(tmp_path) as tensors:
            tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale").float()
            del tensors[name.replace("weight", "input_scale")]
    llm = make(tmp_path, dtype="float32" if change == "float32" else "bfloat16")
    forms = [hold.form for hold in llm.engine.core.runner.model.holding.matrices.values()]
    assert len(forms) == (11 if change == "mixed" else 12)
    assert all(form.rounds == (change == "mixed") for form in forms)
    said = row_of(llm, "weights")[2]
    assert ("not applied: the quantisation of activations" in said) == (
        change in ("static", "float32")
    )
    assert ("1 matrices are widened: its parts have several forms" in said) == (change == "mixed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_does_not(dtype: torch.dtype) -> None:
    assert not can_multiply_fp8(dtype, "cpu", 64)
