"""Muon: momentum whose matrix updates are orthogonalised by a Newton-Schulz iteration.

Based on Keller Jordan's description (https://kellerjordan.github.io/posts/muon/).
"""

from collections import defaultdict

import torch
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrices to g: [K, M, N], by the quintic iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.shape[-2] > g.shape[-1] else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.shape[-2] > g.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised together."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for shape, matrices in alike.items():
                grads = torch.stack([p.grad for p in matrices])
                for p, grad in zip(matrices, grads, strict=True):
                    buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    buffer.lerp_(grad, 1 - group["momentum"])
                    grad.lerp_(buffer, group["momentum"])
                scale = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(matrices, orthogonalise(grads), strict=True):
                    p.add_(update, alpha=scale)
