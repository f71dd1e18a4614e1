"""Layers with states of the gated delta rule (arXiv 2412.06464), in torch: the reference.

A call has the chunks of all rows of a step, of any lengths; each row's states are written in place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_LENGTH = 1e-6


class RowChunks(NamedTuple):
    """Consecutive tokens of some rows, int64: those of ``rows [S]``'s i-th are ``starts[i]`` to
    ``starts[i + 1]``, of ``starts [S + 1]``. No row is there twice, but for those below zero, of
    which nothing is kept. On a GPU the host knows the ``longest`` chunk's tokens."""

    rows: Tensor
    starts: Tensor
    longest: int = 0

    def tokens(self) -> list[tuple[int, slice]]:
        """Each chunk's row and tokens."""
        parts = (slice(*both) for both in pairwise(self.starts.tolist()))
        return list(zip(self.rows.tolist(), parts, strict=True))


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, chunks: RowChunks) -> Tensor:
    """x: [T, C], weight: [K, C] -> [T, C], behind SiLU; each channel by itself.

    ``tails [rows, C, K - 1]`` are the newest inputs of each row, before the first of its chunk and
    afterwards behind the last one.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, tokens in chunks.tokens():
        whole = torch.cat([tails[row], x[tokens].t()], dim=1)
        tails[row] = whole[:, whole.shape[1] - tails.shape[2] :]
        count = tokens.stop - tokens.start
        taps = (by[:, None] * whole[:, j : j + count] for j, by in enumerate(weight))
        out[tokens] = F.silu(torch.stack(list(taps)).sum(dim=0)).t()
    return out


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, states: Tensor, chunks: RowChunks
) -> Tensor:
    """qkv: [T, 2 Hk Dk + H Dv], queries, keys and values of each head side by side; b, a: [T, H];
    decay: [2, H], logarithms of rates and biases of time steps -> [T, H, Dv].

    Head h reads the key head h Hk / H. ``states [rows, H, Dk, Dv]`` are those before the first
    token of each chunk, and afterwards behind the last. Numbers are the states', float32 or more.
    """
    _, heads, key_dim, value_dim = states.shape
    keys = (qkv.shape[1] - heads * value_dim) // 2
    q, k, v = (x.to(states.dtype) for x in qkv.split([keys, keys, heads * value_dim], dim=1))
    each = heads * key_dim // keys
    q, k = (unit(x.unflatten(1, (-1, key_dim))).repeat_interleave(each, dim=1) for x in (q, k))
    q, v, beta = q * key_dim**-0.5, v.unflatten(1, (heads, -1)), b.sigmoid().to(states.dtype)
    rates, bias = decay.to(states.dtype)
    kept = (-rates.exp() * F.softplus(a.to(states.dtype) + bias)).exp()
    out = torch.empty_like(v)
    for row, tokens in chunks.tokens():
        state = states[row]
        for t in range(tokens.start, tokens.stop):
            state = state * kept[t, :, None, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            change = (v[t] - known) * beta[t, :, None]
            state = state + k[t, :, :, None] * change[:, None]
            out[t] = torch.einsum("hkv,hk->hv", state, q[t])
        states[row] = state
    return out.to(qkv.dtype)


def rule_sizes(qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, states: Tensor) -> int:
    """How many heads of keys the operands of a kernel have: all with dense rows, ``decay`` and
    ``states`` dense and in float32. ``ValueError`` if they do not fit."""
    _, heads, key_dim, value_dim = states.shape
    tokens, width = qkv.shape
    key_heads = (width - heads * value_dim) // (2 * key_dim)
    fits = [
        width == 2 * key_heads * key_dim + heads * value_dim,
        key_heads > 0 and heads % key_heads == 0,
        decay.shape == (2, heads),
        a.shape == b.shape == (tokens, heads) and a.stride() == b.stride(),
        qkv.stride(1) == a.stride(1) == 1 and a.dtype is b.dtype is qkv.dtype,
        decay.dtype is states.dtype is torch.float32,
        decay.is_contiguous() and states.is_contiguous(),
    ]
    if not all(fits):
        given = [f"{list(each.shape)} {each.dtype}" for each in (qkv, b, a, decay, states)]
        raise ValueError(f"gated_delta_rule: {given} do not fit")
    return key_heads


def unit(x: Tensor) -> Tensor:
    """x: [..., N], each divided by its length."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LEAST_LENGTH)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """x: [T, H, D], weight: [D], gate: [T, H D] -> [T, H D]: the norm of each head, times the
    weight, times the SiLU of the gate."""
    wide = torch.promote_types(x.dtype, torch.float32)
    numbers = x.to(wide)
    normed = numbers * torch.rsqrt(numbers.square().mean(dim=-1, keepdim=True) + eps)
    scaled = weight * normed.to(x.dtype)
    return (scaled.flatten(1) * F.silu(gate.to(wide))).to(x.dtype)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x: [T, N], times the sigmoid of its gate [T, N]."""
    return x * gate.sigmoid()
