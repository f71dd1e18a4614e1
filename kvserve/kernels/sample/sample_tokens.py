"""Tokens from logits: temperature, top-k, top-p, min-p and a draw, for all rows at once.

Noise is a hash of (seed, position, token id), added to the logits that the filters leave
(Gumbel-max): a row's token depends neither on the batch it is in nor on the device's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.late import Late

sample_tokens_triton = Late("kernels.sample.sample_tokens_triton:sample_tokens_triton")


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
