"""Hybrids as they are published in few bits, beside the weights that their files mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvserve import LLM
from kvserve.engine.models import held
from kvserve.engine.models.delta_layers import DeltaTransformer
from kvserve.kernels.layer.weight_levels import Levels
from kvserve.log import ConfigError
from tests.checkpoints import edited_tensors, random_prompts
from tests.engine.models.decoding import make, row_of, tokens
from tests.engine.models.hybrids import OURS, write_hybrid
from tests.engine.recorder import Recorder
from tests.quantized_checkpoints import AWQ, block_fp8, gptq, quantize_written
from tests.thinning import slow

PROMPTS, TOKENS = random_prompts([5, 70, 1, 33]), 24


def logits_of(llm: LLM) -> torch.Tensor:
    """[prompts, TOKENS, vocab], and those of a decoded token."""
    recorder = Recorder(llm)
    tokens(llm, PROMPTS, TOKENS)
    return torch.stack([torch.stack(recorder.logits[at]) for at in range(len(PROMPTS))])


def quantized(kind: str, directory: Path, config: dict[str, Any]) -> Path:
    """One of our own families so, and beside it a plain one of what it means."""
    for where in (directory, directory / "plain"):
        sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160}
        write_hybrid(kind, where, **sizes, **({"mlp_only_layers": []} if "next" in kind else {}))
    return quantize_written(directory, config)


@pytest.mark.compiler
@pytest.mark.parametrize("config", [block_fp8(), block_fp8(32, 48), *slow(AWQ, gptq())])
@pytest.mark.parametrize("kind", sorted(OURS))
def test_logits_are_those_of_the_dequantised_weights(
    kind: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held, sums of a product have another order; widened, they are the same to the last bit."""
    plain = quantized(kind, tmp_path, config)
    wanted = logits_of(make(plain))
    llm = make(tmp_path)
    model = llm.engine.core.runner.model
    assert isinstance(model, DeltaTransformer)
    levels = [part for part in model.layers.modules() if isinstance(part, Levels)]
    assert len(levels) == 4 * (4 if kind == "qwen3_5_text" else 6)
    assert row_of(llm, "weights")[2].startswith("as stored")
    torch.testing.assert_close(logits_of(llm), wanted, atol=2e-3, rtol=0.0)
    monkeypatch.setattr(held, "select_level_product", lambda *_: ("", "there is no product"))
    widened = make(tmp_path)
    assert "widened: there is no product" in row_of(widened, "weights")[2]
    assert torch.equal(logits_of(widened), wanted)


def test_experts_in_one_fp8_tensor_are_refused(tmp_path: Path) -> None:
    quantized("qwen3_5_moe_text", tmp_path, block_fp8())
    with edited_tensors(tmp_path) as stored:
        first = "model.layers.0.mlp.experts."
        for name in [name for name in stored if name.startswith(first)]:
            del stored[name]
        stored[f"{first}gate_up_proj"] = torch.zeros(4, 96, 96).to(torch.float8_e4m3fn)
        stored[f"{first}gate_up_proj_scale_inv"] = torch.ones(4, 1, 1)
    with pytest.raises(ConfigError, match=r"gate_up_proj in FP8, all experts in one tensor"):
        make(tmp_path)
