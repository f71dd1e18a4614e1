"""Tokens from logits: temperature, top-k, top-p, min-p and a draw, for all rows at once.

Noise is a hash of (seed, position, token id), added to the logits that the filters leave
(Gumbel-max): a row's token depends neither on the batch it is in nor on the device's state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense
from kvserve.kernels.dispatch import Helper, Kernel, num_processors
from kvserve.kernels.ordering import order_of
from kvserve.late import Late

if TYPE_CHECKING:
    import triton.language as tl

cut_offs = Late("kernels.sampling.cut_offs:cut_offs")
# Tokens that a program takes at once.
_DRAW_TILE = 1024


def sample_tokens(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, filtered: bool
) -> Tensor:
    """A token of each row: float32 [S, V] -> int64 [S].

    settings: float32 [S, 4], each row's temperature (0: its likeliest token), top_p (1: all), top_k
    (0: all) and min_p (0: all); seeds, positions: int64 [S]. ``filtered`` says whether any row asks
    for top-k, top-p or min-p. Among equals, lower ids come first, and top-k is taken first, then
    top-p of what it left, then min-p.
    """
    sample = sample_tokens_triton if logits.is_cuda else sample_tokens_torch
    return sample(logits, settings, seeds, positions, filtered)


def sample_tokens_torch(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, filtered: bool
) -> Tensor:
    """The reference, by sorting. It reads back which rows draw, so it would wait for a GPU."""
    tokens = logits.argmax(dim=-1)
    drawing = settings[:, 0].nonzero()[:, 0]
    temperature, top_p, top_k, min_p = settings[drawing].unbind(dim=1)
    scaled = logits[drawing] / temperature[:, None]
    if filtered:
        scaled = keep_allowed(scaled, top_p, top_k, min_p)
    noise = gumbel_noise(seeds[drawing], positions[drawing], logits.shape[1])
    tokens[drawing] = (scaled + noise).argmax(dim=-1)
    return tokens


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise of every token id: seeds, positions int64 [S] -> float32 [S, V]."""
    key = _mix(_mix(seeds ^ (seeds >> 32)) ^ positions)
    token = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(key[:, None] + token * 0x9E3779B1)
    # 23 bits: with one more, float32 rounds the largest to 1, whose noise is infinite and would
    # lift even a token that a filter or a grammar has banned.
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (the finaliser of MurmurHash3), in int64 arithmetic."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keep_allowed(scaled: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Keep what top-k, then top-p, then min-p allow: [S, V] with -inf elsewhere."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, float(scaled.shape[1]))
    ordered = ordered.masked_fill(rank >= limit[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # A rounded sum may reach 1 early, which must not cut off a row without a limit.
    most = torch.where(top_p < 1, top_p, torch.inf)
    out = (before >= most[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    out[:, 0] = False
    kept = ordered.masked_fill(out, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, kept)


def sample_tokens_triton(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, filtered: bool
) -> Tensor:
    """As ``sample_tokens_torch``, in four launches (one, if nothing is filtered) and no sort.

    Hash, division and ties are the reference's bit for bit. Probabilities are added in another
    order and logarithms rounded differently, so the answer may be another one only where a token
    stands within some float32 rounding of the top-p or min-p limit, or of the winner.
    """
    rows, vocab = _check(logits, settings, seeds, positions)
    tiles = -(-vocab // _DRAW_TILE)
    # Eight programs for each multiprocessor, if there is as much to do.
    parts = min(tiles, -(-8 * num_processors(logits.device) // max(1, rows)))
    best = logits.new_empty(rows, parts)
    tokens = torch.empty_like(best, dtype=torch.int64)
    _draw.launch(
        (rows, parts),
        *(best, tokens, logits, cut_offs(logits, settings) if filtered else seeds),
        *(settings, seeds, positions, vocab, logits.stride(0), -(-tiles // parts) * _DRAW_TILE),
        FILTERED=filtered,
        TILE=_DRAW_TILE,
        num_warps=4,
    )
    return tokens.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


def _check(logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor) -> tuple[int, int]:
    rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or vocab == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits need float32, dense rows of one token or more; got {logits.dtype} "
            f"{list(logits.shape)}, strides {list(logits.stride())}"
        )
    check_dense("settings", settings, (rows, 4), torch.float32)
    for name, x in (("seeds", seeds), ("positions", positions)):
        check_dense(name, x, (rows,), torch.int64)
    return rows, vocab


@Helper
def _mixed(x):
    """``_mix`` in uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@Kernel
def _draw(
    best,
    tokens,
    logits,
    cuts,
    settings,
    seeds,
    positions,
    vocab,
    stride,
    share,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(settings + row * 4)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    cut, seed = tl.load(cuts + row), tl.load(seeds + row)
    key = _mixed((seed ^ (seed >> 32)).to(tl.uint32))
    key = _mixed(key ^ tl.load(positions + row).to(tl.uint32))
    top = tl.full([TILE], float("-inf"), tl.float32)
    winner = tl.zeros([TILE], tl.int32)
    for start in range(part * share, tl.minimum(part * share + share, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
        x = tl.div_rn(x, divisor)
        drawn = temperature > 0
        if FILTERED:
            x = tl.where(order_of(x, token) >= cut, x, float("-inf"))
            drawn = drawn & (tl.max(x) > float("-inf"))
        if drawn:
            bits = _mixed(key + token.to(tl.uint32) * 0x9E3779B1)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 2.0**-23
            x -= tl.log(-tl.log(uniform))
        better = x > top
        top = tl.where(better, x, top)
        winner = tl.where(better, token, winner)
    most = tl.max(top)
    first = tl.min(tl.where(top == most, winner, vocab))
    place = row * tl.num_programs(1) + part
    tl.store(best + place, most)
    tl.store(tokens + place, first)
