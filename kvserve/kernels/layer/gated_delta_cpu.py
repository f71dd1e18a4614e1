"""Layers with states of the gated delta rule on a CPU: calls ``gated_delta.cpp``.

The functions of ``gated_delta.py``, for float32 and bfloat16, over states in float32. Nothing is
computed of rows below zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled
from kvserve.kernels.layer.gated_delta import RowChunks, rule_sizes

DTYPES = (torch.float32, torch.bfloat16)
MAX_TAPS, MAX_DIM = 8, 256
_WORTH_A_THREAD = 32768  # numbers of states, or that are gated
_CONVOLUTION = Compiled("causal_convolution", "gated_delta")
_RULE = Compiled("gated_delta_rule", "gated_delta")
_GATE = Compiled("gate", "gated_delta")
_REFUSALS = {
    1: "chunk {} is of row {}, which has no states",
    2: "chunk {} ends at token {}, which is not there",
}


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, chunks: RowChunks) -> Tensor:
    """x: [T, C] with dense rows, weight: [K, C], tails: [rows, C, K - 1], of one dtype."""
    (tokens, channels), taps = x.shape, weight.shape[0]
    fits = weight.shape == (taps, channels) and tails.shape[1:] == (channels, taps - 1)
    fits = fits and x.stride(1) == 1 and 1 < taps <= MAX_TAPS
    _check("causal_convolution", x, fits, weight, tails)
    out = torch.empty(tokens, channels, dtype=x.dtype)
    sizes = channels, taps, x.stride(0), x.dtype is torch.bfloat16, _threads(x.numel())
    _CONVOLUTION(
        *(x, weight, tails, out), *_of(chunks, tokens, len(tails)), *sizes, refused=_REFUSALS
    )
    return out


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, states: Tensor, chunks: RowChunks
) -> Tensor:
    """qkv: [T, 2 Hk Dk + H Dv], b, a: [T, H], all with dense rows; decay: [2, H] and states:
    [rows, H, Dk, Dv], dense and in float32."""
    rows, heads, key_dim, value_dim = states.shape
    tokens, key_heads = len(qkv), rule_sizes(qkv, b, a, decay, states)
    _check("gated_delta_rule", qkv, max(key_dim, value_dim) <= MAX_DIM)
    out = torch.empty(tokens, heads, value_dim, dtype=qkv.dtype)
    numbers = tokens * heads * key_dim * value_dim
    sizes = key_heads, heads, key_dim, value_dim, qkv.stride(0), a.stride(0)
    _RULE(
        *(qkv, b, a, decay, states, out),
        *(*_of(chunks, tokens, rows), *sizes, qkv.dtype is torch.bfloat16, _threads(numbers)),
        refused=_REFUSALS,
    )
    return out


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x: [T, H, D], dense, weight: [D], gate: [T, H D] with dense rows."""
    _, heads, width = x.shape
    _check("gated_norm", x, weight.shape == (width,) and x.is_contiguous(), weight)
    return _gated(x, gate, weight, heads, eps)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x: [T, N], dense, gate: [T, N] with dense rows."""
    _check("sigmoid_gate", x, x.dim() == 2 and x.is_contiguous())
    return _gated(x, gate, None, 1, 0.0)


def _gated(x: Tensor, gate: Tensor, weight: Tensor | None, heads: int, eps: float) -> Tensor:
    tokens, width = x.shape[0], x.shape[-1]
    if gate.shape != (tokens, heads * width) or gate.stride(1) != 1 or gate.dtype is not x.dtype:
        raise ValueError(f"gate: {list(gate.shape)} of {gate.dtype} does not fit {list(x.shape)}")
    out = torch.empty(tokens, heads * width, dtype=x.dtype)
    sizes = tokens, heads, width, gate.stride(0), x.dtype is torch.bfloat16, _threads(x.numel())
    _GATE(x, gate, weight, out, *sizes, eps)
    return out


def _of(chunks: RowChunks, tokens: int, rows: int) -> tuple[object, ...]:
    """What a call says of its chunks; ``fault`` is left out."""
    at, starts, _ = chunks
    dense = all(x.dtype is torch.int64 and x.is_contiguous() for x in (at, starts))
    if not dense or len(starts) != len(at) + 1:
        raise ValueError("chunks: dense int64 rows [S] and starts [S + 1] are needed")
    return at, starts, len(at), tokens, rows


def _threads(numbers: int) -> int:
    return max(1, min(torch.get_num_threads(), numbers // _WORTH_A_THREAD))


def _check(name: str, x: Tensor, fits: bool, *others: Tensor) -> None:
    """Raise ``ValueError`` unless the kernel's assumptions hold."""
    alike = x.dtype in DTYPES and all(other.dtype is x.dtype for other in others)
    if not (fits and alike and all(other.is_contiguous() for other in others)):
        given = [f"{list(each.shape)} {each.dtype}" for each in (x, *others)]
        raise ValueError(f"{name}: {given} do not fit, or are not dense, float32 or bfloat16")
