"""The second half of a layer as a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvserve.engine.models.families import ExpertSpec
from kvserve.engine.models.feed_forward import Mlp, NewMatrix, empty
from kvserve.engine.models.linear import expert_linear, linear
from kvserve.engine.models.operators import Operators
from kvserve.late import Late

_clamped_swiglu = Late("kernels.layer.elementwise:clamped_swiglu")


class Experts(nn.Module):
    """E experts, of which a router gives each token some: ``gate_up [E, 2 width, hidden]``, ``down
    [E, hidden, width]``. Ranks have parts of each expert, and all of the router. With a ``limit``
    (gpt-oss) all of them have biases, and gates and ups lie in turns."""

    def __init__(
        self, hidden: int, spec: ExpertSpec, operators: Operators, matrix: NewMatrix
    ) -> None:
        super().__init__()
        self._activate, self.spec = operators.silu_and_mul, spec
        self.router = empty(spec.count, hidden)
        self.gate_up = matrix("mlp.gate_up", spec.count, 2 * spec.intermediate_size, hidden)
        self.down = matrix("mlp.down", spec.count, hidden, spec.intermediate_size)
        biased = spec.limit is not None
        self.router_bias = empty(spec.count) if biased else None
        self.gate_up_bias = empty(spec.count, 2 * spec.intermediate_size) if biased else None
        self.down_bias = empty(spec.count, hidden) if biased else None
        if spec.limit is not None:
            self._activate = partial(_clamped_swiglu, limit=spec.limit, alpha=spec.alpha)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> this rank's part of [T, hidden]."""
        logits = linear(x, self.router, self.router_bias)
        routes = route(logits, self.spec.per_token, self.spec.normalised)
        products = expert_linear(x[routes.tokens], self.gate_up, routes.ends)
        if self.gate_up_bias is not None:
            products = products + self.gate_up_bias[routes.experts]
        answers = expert_linear(self._activate(products), self.down, routes.ends)
        if self.down_bias is not None:
            answers = answers + self.down_bias[routes.experts]
        return combine(answers, routes)


class SharedAndExperts(nn.Module):
    """Experts, and beside them an MLP of all tokens, whose answer a gate of each token weighs."""

    def __init__(
        self, hidden: int, width: int, spec: ExpertSpec, operators: Operators, matrix: NewMatrix
    ) -> None:
        super().__init__()
        self.shared = Mlp(hidden, width, operators, _within("shared", matrix))
        self.experts = Experts(hidden, spec, operators, _within("experts", matrix))
        self.gate = empty(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.experts(x) + linear(x, self.gate).sigmoid() * self.shared(x)


def _within(part: str, matrix: NewMatrix) -> NewMatrix:
    """Matrices of a part of the second half, under its name."""
    return lambda name, *shape: matrix(name.replace("mlp.", f"mlp.{part}."), *shape)


class Routes(NamedTuple):
    """T tokens with k experts each, sorted by expert: ``tokens [T k]`` are their rows in the batch,
    expert e has those from ``ends[e - 1]`` to ``ends[e]`` (int32 [E]); ``place [T, k]`` is where
    each pair went, ``weights [T, k]`` what its answer counts. ``experts [T k]`` ascend."""

    tokens: Tensor
    ends: Tensor
    place: Tensor
    weights: Tensor
    experts: Tensor


def route(logits: Tensor, per_token: int, normalised: bool) -> Routes:
    """logits: [T, E]. Of the softmax over all experts, the largest ``per_token``; ``normalised``:
    so that they add up to one. Nothing is copied to the host."""
    probs = logits.float().softmax(dim=-1)
    weights, chosen = probs.topk(per_token, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    by_expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(logits.shape[1], device=logits.device)
    ends = torch.searchsorted(by_expert, experts, right=True).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return Routes(order // per_token, ends, place.view_as(chosen), weights, by_expert)


def combine(answers: Tensor, routes: Routes) -> Tensor:
    """answers: [T k, hidden], sorted by expert -> their weighted sums, [T, hidden]."""
    weighted = answers[routes.place] * routes.weights.to(answers.dtype)[..., None]
    return weighted.sum(dim=1)
