"""A model's operations beside its matrix products, in torch: the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
SMALLEST = 1e-12  # of a row's largest number, so that a row of zeros has a scale


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [..., N], weight: [N].

    Rounds before it multiplies by the weight, as transformers does; this matters for bfloat16.
    """
    return weight * F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``rms_norm``, with a float32 weight, and rounded once."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and added: [T, N], weight: [N] -> their sum, and ``rms_norm`` of that."""
    whole = x + added
    return whole, rms_norm(whole, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [T, heads, D], cos and sin: [T, 1, D] -> x, rotated in halves (RoPE)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [T, 2 N], gates first -> [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """As ``silu_and_mul``, with GELU approximated by tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def scale(x: Tensor, factor: float) -> Tensor:
    """x, times a number."""
    return x * factor


def add(x: Tensor, added: Tensor) -> Tensor:
    """Their sum."""
    return x + added


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """gate_up: [T, 2 N], gates and ups in turns -> [T, N] (gpt-oss, arXiv 2508.10925, 2.2)."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def argmax(x: Tensor) -> Tensor:
    """x: [T, N] -> the first place of each row's largest number: int64 [T]."""
    return x.argmax(dim=-1)


def take_rows(table: Tensor, places: Tensor) -> Tensor:
    """table: [N, W], places: int64 [T] -> its rows there, [T, W]."""
    return F.embedding(places, table)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [T, N] -> e4m3 [T, N] and float32 scales [T, 1]: a row's largest number becomes 448."""
    numbers = x.float()
    largest = numbers.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    most = torch.full_like(largest, E4M3_MAX)  # by numbers torch divides in two steps
    rounded = (numbers * (most / largest)).clamp(-E4M3_MAX, E4M3_MAX)
    return rounded.to(torch.float8_e4m3fn), largest / most
