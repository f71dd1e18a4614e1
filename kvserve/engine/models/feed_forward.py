"""The second half of a layer: an MLP for all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvserve.engine.models.linear import Weight, linear
from kvserve.engine.models.operators import Operators

NewMatrix = Callable[..., Weight]
"""Makes a matrix of a layer, of this name and shape: numbers or levels that are read later."""


class Mlp(nn.Module):
    """Gate and up are one matrix."""

    def __init__(
        self,
        hidden: int,
        width: int,
        operators: Operators,
        matrix: NewMatrix,
        activation: str = "silu",
    ) -> None:
        super().__init__()
        silu, gelu = operators.silu_and_mul, operators.gelu_and_mul
        self._activate = silu if activation == "silu" else gelu
        self.gate_up = matrix("mlp.gate_up", 2 * width, hidden)
        self.down = matrix("mlp.down", hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]."""
        return linear(self._activate(linear(x, self.gate_up)), self.down)


def empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A weight that is read later."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
