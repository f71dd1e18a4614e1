"""Mixtures of experts: routes, products grouped by expert, and what neighbours change (nothing)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.models.experts import combine, route
from kvserve.engine.models.linear import expert_linear, packed
from kvserve.kernels.layer.linear_cpu import ExpertPanels
from kvserve.log import ConfigError
from tests.checkpoints import edit_config, read_spec, write_checkpoint
from tests.engine.models.decoding import make

EXPERTS, HIDDEN, OUTPUTS = 6, 48, 72


def weights(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(EXPERTS, OUTPUTS, HIDDEN).to(dtype), requires_grad=False)


def mixture(x: Tensor, logits: Tensor, weight: Tensor, per_token: int) -> Tensor:
    """Token by token, in float64."""
    probs = logits.double().softmax(-1)
    rows = []
    for token, of_token in zip(x.double(), probs, strict=True):
        chosen = of_token.topk(per_token)
        share = chosen.values / chosen.values.sum()
        answers = [F.linear(token, weight[expert].double()) for expert in chosen.indices]
        rows.append(sum(part * answer for part, answer in zip(share, answers, strict=True)))
    return torch.stack(rows)


@pytest.mark.parametrize("product", ["torch", pytest.param("compiled", marks=pytest.mark.compiler)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_token", [1, 2, EXPERTS])
@pytest.mark.parametrize("tokens", [1, 3, 130])
def test_experts_answer_as_they_would_one_by_one(
    tokens: int, per_token: int, dtype: torch.dtype, product: str
) -> None:
    x, logits, weight = (
        torch.randn(tokens, HIDDEN).to(dtype),
        torch.randn(tokens, EXPERTS),
        weights(dtype),
    )
    logits[:, 3] = -9.0  # an expert that no token wants, unless all are taken
    wanted = mixture(x, logits, weight.data.clone(), per_token)
    held = packed(weight, product)
    assert isinstance(held, ExpertPanels) == (product == "compiled")
    routes = route(logits, per_token, normalised=True)
    found = combine(expert_linear(x[routes.tokens], held, routes.ends), routes)
    error = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.double(), wanted, atol=error * HIDDEN**0.5, rtol=error)


@pytest.mark.compiler
def test_a_token_does_not_depend_on_the_others() -> None:
    x, logits = torch.randn(90, HIDDEN), torch.randn(90, EXPERTS)
    held = packed(weights(), "compiled")

    def answers(some: slice) -> Tensor:
        routes = route(logits[some], 3, normalised=True)
        return combine(expert_linear(x[some][routes.tokens], held, routes.ends), routes)

    together = answers(slice(None))
    for some in (slice(0, 1), slice(5, 14), slice(89, 90)):
        assert torch.equal(answers(some), together[some])
    copied = copy.deepcopy(held)
    assert isinstance(copied, ExpertPanels) and copied.experts == EXPERTS


@pytest.mark.compiler
@pytest.mark.parametrize("ends", [[1, 2, 3, 4, 5, 7], [0, 2, 1, 4, 5, 6], [6] * 5])
def test_ends_that_do_not_divide_the_rows_are_refused(ends: list[int]) -> None:
    held = packed(weights(), "compiled")
    with pytest.raises(ValueError, match="ends"):
        expert_linear(torch.randn(6, HIDDEN), held, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "sends a token to 9 of 8 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts to 0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers for 2 of 3 layers"),
    ],
)
def test_what_makes_no_sense_is_refused(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    edit_config(write_checkpoint(kind, tmp_path), **changes)
    with pytest.raises(ConfigError, match=message):
        read_spec(tmp_path)


def test_codes_want_rope_in_every_layer(tmp_path: Path) -> None:
    write_checkpoint("smollm3", tmp_path)
    with pytest.raises(ConfigError, match="is not in every layer of SmolLM3ForCausalLM"):
        make(tmp_path, policy="spindlekv")


@pytest.mark.parametrize(
    ("kind", "message"), [("olmo2", "over all heads"), ("phi3", "in one matrix")]
)
def test_ranks_that_cannot_divide_a_family_are_refused(
    kind: str, message: str, tmp_path: Path
) -> None:
    spec = read_spec(write_checkpoint(kind, tmp_path))
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size: .* {message}"):
        spec.part(2)
