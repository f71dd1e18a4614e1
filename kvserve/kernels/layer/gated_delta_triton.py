"""``gated_delta.py`` in Triton, over states in float32. Rows below zero keep no state.

Short chunks are computed token by token, longer ones 16 tokens at a time, in matrix products: exact
for float32, else of sums of two bfloat16 (16 bits). What the tokens of a piece change of one
another is solved front to back. Decays are sums of logarithms from one token to another, not
differences of sums from the beginning: a gate that forgets everything takes no digit of later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Helper, Kernel, interprets
from kvserve.kernels.layer.gated_delta import RowChunks, rule_sizes

if TYPE_CHECKING:
    import triton.language as tl

_PIECE = 16
_STEPS = 4
"""Chunks of up to so many tokens are computed token by token."""
_CHANNELS, _VALUES = 128, 32


def causal_convolution(x: Tensor, weight: Tensor, tails: Tensor, chunks: RowChunks) -> Tensor:
    """As the reference. x: [T, C] with dense rows; weight: [K, C], K up to 17, and tails, dense."""
    (tokens, channels), taps = x.shape, weight.shape[0]
    fits = weight.shape == (taps, channels) and tails.shape[1:] == (channels, taps - 1)
    dense = x.stride(1) == 1 and weight.is_contiguous() and tails.is_contiguous()
    if not (fits and dense and 1 < taps <= _PIECE + 1 and x.dtype is weight.dtype is tails.dtype):
        given = list(x.shape), list(weight.shape), list(tails.shape)
        raise ValueError(f"causal_convolution: {given} do not fit, or are not dense")
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    piece = 1 if chunks.longest == 1 else _PIECE
    _convolve.launch(
        (len(chunks.rows), -(-chunks.longest // piece), -(-channels // _CHANNELS)),
        *(out, x, weight, tails, chunks.rows, chunks.starts, x.stride(0), channels),
        TAPS=taps,
        TAIL=1 << (taps - 2).bit_length(),
        TOKENS=piece,
        CHANNELS=_CHANNELS,
        num_warps=4,
    )
    return out


def gated_delta_rule(
    qkv: Tensor, b: Tensor, a: Tensor, decay: Tensor, states: Tensor, chunks: RowChunks
) -> Tensor:
    """As the reference. qkv: [T, 2 Hk Dk + H Dv], b, a: [T, H], with dense rows."""
    key_heads = rule_sizes(qkv, b, a, decay, states)
    _, heads, key_dim, value_dim = states.shape
    out = torch.empty(len(qkv), heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    values = min(_VALUES, max(16, 1 << (value_dim - 1).bit_length()))
    grid = len(chunks.rows), heads, -(-value_dim // values)
    given = out, qkv, b, a, decay, states, chunks.rows, chunks.starts
    sizes: dict[str, Any] = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": max(16, 1 << (key_dim - 1).bit_length()),
        "VALUES": values,
        "STEPS": _STEPS,
    }
    how = qkv.stride(0), a.stride(0), key_heads, heads
    # Each takes its own chunks: a row's bits do not depend on the rows beside it.
    _by_steps.launch(grid, *given, *how, **sizes, num_warps=4)
    if chunks.longest > _STEPS:
        sizes |= {"TOKENS": _PIECE, "PRECISION": _precision(qkv.dtype)}
        _by_pieces.launch(grid, *given, *how, **sizes, num_warps=8)
    return out


def _precision(dtype: torch.dtype) -> str:
    """Of products of pieces. Neither the interpreter nor Triton 3.5 knows sums of bfloat16."""
    if dtype is torch.float32 or interprets():
        return "ieee"
    from triton.backends.nvidia.compiler import CUDAOptions

    return "bf16x3" if "bf16x3" in CUDAOptions.allowed_dot_input_precisions else "tf32x3"


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """As the reference. x: [T, H, D], dense; gate: [T, H D] with dense rows."""
    return _gated(x, gate, weight, x.shape[1], eps)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """As the reference. x: [T, N], dense; gate: [T, N] with dense rows."""
    return _gated(x, gate, None, 1, 0.0)


def _gated(x: Tensor, gate: Tensor, weight: Tensor | None, heads: int, eps: float) -> Tensor:
    tokens, width = x.shape[0], x.shape[-1]
    fits = gate.shape == (tokens, heads * width) and gate.stride(1) == 1 and x.is_contiguous()
    fits = fits and (weight is None or weight.shape == (width,)) and gate.dtype is x.dtype
    if not fits:
        raise ValueError(f"gate: {list(gate.shape)} of {gate.dtype} does not fit {list(x.shape)}")
    out = torch.empty(tokens, heads * width, dtype=x.dtype, device=x.device)
    _gate.launch(
        (tokens, heads),
        *(out, x, gate, weight, gate.stride(0), eps),
        WIDTH=width,
        SPAN=1 << (width - 1).bit_length(),
        num_warps=8 if width > 2048 else 4 if width > 256 else 1,
    )
    return out


@Helper
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@Helper
def unit(x):
    """x: [T, N], each divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@Helper
def softplus(x):
    """log(1 + exp(x)), with all digits of what is nearly nothing."""
    small = tl.exp(tl.minimum(x, 20.0))
    part = small / (2.0 + small)
    by = part * part
    series = 1 / 3 + by * (1 / 5 + by * (1 / 7 + by * (1 / 9 + by * (1 / 11 + by / 13))))
    found = tl.where(x < 0.0, 2.0 * part * (1.0 + by * series), tl.log(1.0 + small))
    return tl.where(x > 20.0, x, found)


@Helper
def strengths(b, a, decay, place, known, head, heads):
    """What tokens at ``place`` of ``b`` and ``a`` change, and the logarithm of what they keep."""
    rate, bias = tl.exp(tl.load(decay + head)), tl.load(decay + heads + head)
    step = tl.load(a + place, mask=known, other=0.0).to(tl.float32) + bias
    strength = tl.load(b + place, mask=known, other=0.0)
    beta = sigmoid(strength.to(tl.float32)).to(strength.dtype).to(tl.float32)
    return tl.where(known, beta, 0.0), tl.where(known, -rate * softplus(step), 0.0)


@Kernel
def _convolve(
    out,
    x,
    weight,
    tails,
    rows,
    starts,
    token_stride,
    channels,
    TAPS: tl.constexpr,
    TAIL: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    HELD: tl.constexpr = TAPS - 1
    chunk, piece = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(rows + chunk), tl.load(starts + chunk)
    count = tl.load(starts + chunk + 1) - first
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < channels
    source = x + first * token_stride + channel[None]
    tail = tails + (row * channels + channel[None]) * HELD
    held = known[None] & (row >= 0)
    at = piece * TOKENS + tl.arange(0, TOKENS)
    inside = (at < count)[:, None] & known[None]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for j in tl.static_range(TAPS):
        place = at[:, None] + j - HELD
        number = tl.load(source + place * token_stride, mask=inside & (place >= 0), other=0.0)
        older = inside & held & (place < 0)
        number += tl.load(tail + place + HELD, mask=older, other=0.0)
        by = tl.load(weight + j * channels + channel, mask=known, other=0.0)
        total += number.to(tl.float32) * by.to(tl.float32)[None]
    total = total.to(out.dtype.element_ty).to(tl.float32)
    target = out + (first + at)[:, None] * channels + channel[None]
    tl.store(target, (total * sigmoid(total)).to(out.dtype.element_ty), mask=inside)
    if piece == 0:  # no other program reads a tail
        column = tl.arange(0, TAIL)[:, None]
        last = source + (count + column - HELD) * token_stride
        kept, of_tail = count + column < HELD, held & (column < HELD)
        newest = tl.load(last, mask=of_tail & ~kept, other=0.0)
        newest += tl.load(tail + count + column, mask=of_tail & kept, other=0.0)
        tl.debug_barrier()  # all threads have read what some overwrite
        tl.store(tail + column, newest, mask=of_tail)


@Kernel
def _by_steps(
    out,
    qkv,
    b,
    a,
    decay,
    states,
    rows,
    starts,
    token_stride,
    rule_stride,
    key_heads,
    heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STEPS: tl.constexpr,
):
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, start, end = tl.load(rows + chunk), tl.load(starts + chunk), tl.load(starts + chunk + 1)
    if end - start > STEPS:
        return
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    place = states + ((row * heads + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None]
    held = is_key[:, None] & is_value[None] & (row >= 0)
    state = tl.load(place, mask=held, other=0.0)
    query = qkv + head // (heads // key_heads) * KEY_DIM
    for token in range(start, end):
        at = token * token_stride
        q = tl.load(query + at + key, mask=is_key, other=0.0).to(tl.float32)
        k = tl.load(query + at + key_heads * KEY_DIM + key, mask=is_key, other=0.0).to(tl.float32)
        q, k = unit(q[None]) * (KEY_DIM**-0.5), unit(k[None])
        of_values = 2 * key_heads * KEY_DIM + head * VALUE_DIM + value
        v = tl.load(qkv + at + of_values, mask=is_value, other=0.0).to(tl.float32)
        beta, kept = strengths(b, a, decay, token * rule_stride + head, True, head, heads)
        state *= tl.exp(kept)
        change = (v - tl.sum(state * tl.trans(k), axis=0)) * beta
        state += tl.trans(k) * change[None]
        read = tl.sum(state * tl.trans(q), axis=0).to(out.dtype.element_ty)
        tl.store(out + (token * heads + head) * VALUE_DIM + value, read, mask=is_value)
    tl.store(place, state, mask=held)


@Kernel
def _by_pieces(
    out,
    qkv,
    b,
    a,
    decay,
    states,
    rows,
    starts,
    token_stride,
    rule_stride,
    key_heads,
    heads,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """With the state S before a piece, and what its tokens keep from one to another, G: its tokens
    change d = (1 + strict lower (beta k k' G))^-1 beta (v - G0 k S); they read
    q G0 S + lower (q k' G) d, and S becomes G0 S + (k G)' d."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, begin, end = tl.load(rows + chunk), tl.load(starts + chunk), tl.load(starts + chunk + 1)
    if end - begin <= STEPS:
        return
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY_DIM, value < VALUE_DIM
    place = states + ((row * heads + head) * KEY_DIM + key[:, None]) * VALUE_DIM + value[None]
    held = is_key[:, None] & is_value[None] & (row >= 0)
    state = tl.load(place, mask=held, other=0.0)
    query = qkv + head // (heads // key_heads) * KEY_DIM + key[None]
    of_values = 2 * key_heads * KEY_DIM + head * VALUE_DIM + value
    t = tl.arange(0, TOKENS)
    before, same = t[:, None] > t[None], t[:, None] == t[None]
    for start in range(begin, end, TOKENS):
        token, known = start + t, start + t < end
        at, mask = token[:, None] * token_stride, known[:, None] & is_key[None]
        k = tl.load(query + at + key_heads * KEY_DIM, mask=mask, other=0.0).to(tl.float32)
        k, wanted = unit(k), known[:, None] & is_value[None]
        v = tl.load(qkv + at + of_values[None], mask=wanted, other=0.0).to(tl.float32)
        beta, kept = strengths(b, a, decay, token * rule_stride + head, known, head, heads)
        later = tl.where(before, kept[:, None], 0.0)
        since, until = tl.exp(tl.cumsum(kept, axis=0)), tl.exp(tl.sum(later, axis=0))
        between = tl.where(before | same, tl.exp(tl.cumsum(later, axis=0)), 0.0)
        turned = tl.trans(k)
        mixed = tl.dot(k, turned, input_precision=PRECISION) * between * beta[:, None]
        mixed = tl.where(before, mixed, 0.0)
        foreseen = tl.dot(k, state, input_precision=PRECISION) * since[:, None]
        change = (v - foreseen) * beta[:, None]
        for j in range(TOKENS):
            done = tl.sum(tl.where((t == j)[:, None], change, 0.0), axis=0)
            change -= tl.sum(tl.where((t == j)[None], mixed, 0.0), axis=1)[:, None] * done[None]
        q = tl.load(query + at, mask=mask, other=0.0).to(tl.float32)
        q = unit(q) * (KEY_DIM**-0.5)
        read = tl.dot(q, state, input_precision=PRECISION) * since[:, None]
        seen = tl.dot(q, turned, input_precision=PRECISION) * between
        read = tl.dot(seen, change, read, input_precision=PRECISION)
        target = out + (token[:, None] * heads + head) * VALUE_DIM + value[None]
        tl.store(target, read.to(out.dtype.element_ty), mask=wanted)
        added = tl.dot(turned * until[None], change, input_precision=PRECISION)
        state = state * tl.exp(tl.sum(kept)) + added
    tl.store(place, state, mask=held)


@Kernel
def _gate(out, x, gate, weight, gate_stride, eps, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, SPAN)
    mask = place < WIDTH
    dtype: tl.constexpr = out.dtype.element_ty
    row = (token * tl.num_programs(1) + head) * WIDTH + place
    numbers = tl.load(x + row, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(gate + token * gate_stride + head * WIDTH + place, mask=mask, other=0.0)
    by = by.to(tl.float32)
    opened = sigmoid(by)
    if weight is None:
        made = numbers * opened.to(dtype).to(tl.float32)
    else:
        normed = numbers * tl.rsqrt(tl.sum(numbers * numbers) / WIDTH + eps)
        scale = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
        scaled = (normed.to(dtype).to(tl.float32) * scale).to(dtype)
        made = scaled.to(tl.float32) * (by * opened)
    tl.store(out + row, made.to(dtype), mask=mask)
