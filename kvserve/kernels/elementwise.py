"""What a model does beside its matrix products and attention, in torch: the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., N], weight: [N].

    Rounds before it multiplies by the weight, as transformers does: bfloat16 can tell.
    """
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D], cos and sin: [T, 1, D] -> x, rotated in halves (RoPE)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 N], gates first -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def argmax(x: Tensor) -> Tensor:
    """x: [T, N] -> the first place of each row's largest number: int64 [T]."""
    return x.argmax(dim=-1)
