"""From logits to tokens, for a whole batch at once.

Noise is a hash of (seed, position, token id): what a request samples depends neither on the batch
it runs in nor on when its step is prepared (Gumbel-max; the branch is part of the seed).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowSampling:
    """What the sampler needs of one sequence; ``seed`` already includes the branch."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    min_len: int
    """Logical length below which stop tokens are held back."""
    logprobs: int | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """``token_ids [S]`` and, where some row asked, log-probabilities of the raw distribution.

    ``logprobs [S]`` and ``ranks [S]`` of the sampled token; ``top_ids``, ``top_logprobs [S, K]``.
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


class SamplingRows:
    """Sampling settings of all rows, on the device, with host copies of what steers the path."""

    def __init__(self, max_rows: int, device: str) -> None:
        self._settings = torch.zeros(max_rows, 4, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._min_len = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._stop_ids = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        # Host: random, filtered, has min_len, log-probabilities wanted (-1: none).
        self._host: IntArray = np.zeros((max_rows, 4), np.int32)

    def set_rows(self, sequences: Sequences[Sequence]) -> None:
        """Take over the settings of newly admitted sequences (``Sequence.sampling``)."""
        for seq in sequences:
            s: RowSampling = seq.sampling
            self._settings[seq.row] = torch.tensor(
                [max(s.temperature, 1e-5), s.top_p, float(s.top_k), s.min_p]
            )
            self._seeds[seq.row] = s.seed
            self._min_len[seq.row] = s.min_len
            filtered = s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0
            self._host[seq.row] = (
                s.temperature > 0.0,
                s.temperature > 0.0 and filtered,
                s.min_len > seq.num_prompt_tokens,
                -1 if s.logprobs is None else s.logprobs,
            )
            self._set_stop_ids(seq.row, seq.stop_token_ids)

    def move_rows(self, to: IntArray, source: IntArray) -> None:
        self._host[to] = self._host[source]
        device = self._settings.device
        dst, src = (torch.as_tensor(x, device=device).long() for x in (to, source))
        for tensor in (self._settings, self._seeds, self._min_len, self._stop_ids):
            tensor[dst] = tensor[src]

    def sample(self, logits: Tensor, at: IntArray, positions: Tensor) -> SampledTokens:
        """logits: float32 [S, V] of rows ``at``; positions: [S], of the tokens being sampled."""
        host = self._host[at]
        rows = torch.as_tensor(at, device=logits.device).long()
        raw = logits
        if host[:, 2].any():
            logits = self._hold_back_stops(logits, rows, positions)
        tokens = logits.argmax(dim=-1)
        random = np.flatnonzero(host[:, 0])
        if len(random):
            picked = torch.as_tensor(random, device=logits.device)
            tokens[picked] = self._draw(
                logits[picked], rows[picked], positions[picked], bool(host[:, 1].any())
            )
        wanted = int(host[:, 3].max(initial=-1))
        return _with_logprobs(raw, tokens, wanted) if wanted >= 0 else SampledTokens(tokens)

    def wants_logprobs(self, at: IntArray) -> IntArray:
        """How many alternatives each of the rows asked for, -1 for none."""
        wanted: IntArray = self._host[at, 3]
        return wanted

    def _draw(self, logits: Tensor, rows: Tensor, positions: Tensor, filtered: bool) -> Tensor:
        temperature, top_p, top_k, min_p = self._settings[rows].unbind(dim=1)
        scaled = logits / temperature[:, None]
        if filtered:
            scaled = _filter(scaled, top_p, top_k, min_p)
        return (scaled + gumbel_noise(self._seeds[rows], positions, logits.shape[1])).argmax(-1)

    def _hold_back_stops(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        held = positions < self._min_len[rows]
        ids = self._stop_ids[rows]
        banned = torch.zeros_like(logits).scatter_(1, ids.clamp(min=0), -torch.inf)
        # Unused places of `ids` are -1 and would ban token 0: put that one back where unasked.
        asked = (ids == 0).any(dim=1)
        banned[:, 0] = torch.where(asked, -torch.inf, 0.0)
        return torch.where(held[:, None], logits + banned, logits)

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = torch.nn.functional.pad(self._stop_ids, (0, missing), value=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(stop_ids)] = torch.tensor(stop_ids)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise of every token id: seeds, positions int64 [S] -> float32 [S, V]."""
    key = _mix(_mix(seeds ^ (seeds >> 32)) ^ positions)
    token = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(key[:, None] + token * 0x9E3779B1)
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (the finaliser of MurmurHash3), in int64 arithmetic."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _filter(scaled: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Keep what top-k, then top-p, then min-p allow: [S, V] with -inf elsewhere."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    limit = torch.where(top_k > 0, top_k, float(scaled.shape[1]))
    ordered = ordered.masked_fill(rank >= limit[:, None], -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    out = (before >= top_p[:, None]) | (probs < min_p[:, None] * probs[:, :1])
    out[:, 0] = False
    kept = ordered.masked_fill(out, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, kept)


def _with_logprobs(logits: Tensor, tokens: Tensor, count: int) -> SampledTokens:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top: Any = logprobs.topk(count, dim=-1)
    return SampledTokens(tokens, chosen[:, 0], ranks, top.indices, top.values)
