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

from kvserve.engine.grammar import SequenceGrammar
from kvserve.engine.logit_rules import LogitRules, RowRules
from kvserve.engine.messages import NewSequence
from kvserve.engine.transfer import to_device
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
    rules: RowRules | None = None
    think_end: int = -1
    """The token that ends the reasoning, where its length is limited."""
    think_limit: int = 0
    """Logical position at which ``think_end`` is put in if it has not come by itself."""
    prompt: PromptScoring | None = None
    grammar: SequenceGrammar | None = None


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """A prompt whose tokens' log-probabilities are wanted, each with ``count`` alternatives."""

    seq_id: int
    token_ids: IntArray
    count: int

    @classmethod
    def of(cls, new: NewSequence) -> PromptScoring | None:
        if new.prompt_logprobs is None:
            return None
        return cls(new.seq_id, np.array(new.token_ids, np.int32), new.prompt_logprobs)


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

    @property
    def tensors(self) -> list[Tensor]:
        """What is there, in this order."""
        parts = self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        return [part for part in parts if part is not None]


class SamplingRows:
    """Sampling settings of all rows, on the device, with host copies of what steers the path."""

    def __init__(self, max_rows: int, vocab_size: int, device: str) -> None:
        self._settings = torch.zeros(max_rows, 4, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._min_len = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._stop_ids = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        # The token that ends a row's reasoning (-1: none is due), and where it is put in.
        self._think_end = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self._think_limit = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._rules = LogitRules(max_rows, vocab_size, device)
        # Host: random, filtered, has min_len, log-probabilities wanted (-1: none), has rules,
        # limits its reasoning, has a grammar.
        self._host: IntArray = np.zeros((max_rows, 7), np.int32)
        self._prompts: np.ndarray[Any, Any] = np.full(max_rows, None, object)

    def set_rows(self, sequences: Sequences[Sequence]) -> None:
        """Take over the settings of newly admitted sequences (``Sequence.sampling``)."""
        for seq in sequences:
            s: RowSampling = seq.sampling
            settings = max(s.temperature, 1e-5), s.top_p, float(s.top_k), s.min_p
            self._settings[seq.row] = to_device(settings, self._settings.device, torch.float32)
            self._seeds[seq.row] = s.seed
            self._min_len[seq.row] = s.min_len
            filtered = s.top_p < 1.0 or s.top_k > 0 or s.min_p > 0.0
            self._host[seq.row] = (
                s.temperature > 0.0,
                s.temperature > 0.0 and filtered,
                s.min_len > seq.num_prompt_tokens,
                -1 if s.logprobs is None else s.logprobs,
                s.rules is not None,
                s.think_end >= 0,
                s.grammar is not None,
            )
            self._prompts[seq.row] = s.prompt
            self._set_stop_ids(seq.row, seq.stop_token_ids)
            self._rules.set_row(seq, s.rules)
            ended = s.think_end in seq.token_ids[seq.num_prompt_tokens :]
            self._think_end[seq.row] = -1 if ended else s.think_end
            self._think_limit[seq.row] = s.think_limit

    def move_rows(self, to: IntArray, source: IntArray) -> None:
        self._host[to] = self._host[source]
        self._prompts[to] = self._prompts[source]
        device = self._settings.device
        dst, src = (to_device(x, device) for x in (to, source))
        self._rules.move_rows(to, source)
        for tensor in (
            *(self._settings, self._seeds, self._min_len, self._stop_ids),
            *(self._think_end, self._think_limit),
        ):
            tensor[dst] = tensor[src]

    def sample(
        self, logits: Tensor, at: IntArray, positions: Tensor, allowed: Tensor | None = None
    ) -> SampledTokens:
        """logits: float32 [S, V] of rows ``at``; positions: [S], of the tokens being sampled.

        ``allowed`` [S, V], boolean, is what the rows' grammars let pass.
        """
        host = self._host[at]
        rows = to_device(at, logits.device)
        raw = logits
        if host[:, 4].any():
            logits = self._rules.apply(logits, at)
        if host[:, 2].any():
            logits = self._hold_back_stops(logits, rows, positions)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        tokens = logits.argmax(dim=-1)
        random = np.flatnonzero(host[:, 0])
        if len(random):
            picked = to_device(random, logits.device)
            tokens[picked] = self.draw(
                logits[picked], rows[picked], positions[picked], bool(host[:, 1].any())
            )
        if host[:, 5].any():
            tokens = self._end_reasoning(tokens, rows, positions)
        if host[:, 4].any():
            self._rules.observe(tokens, at)
        wanted = int(host[:, 3].max(initial=-1))
        return with_logprobs(raw, tokens, wanted) if wanted >= 0 else SampledTokens(tokens)

    def wants_logprobs(self, at: IntArray) -> IntArray:
        """How many alternatives each of the rows asked for, -1 for none."""
        wanted: IntArray = self._host[at, 3]
        return wanted

    def with_grammar(self, at: IntArray) -> IntArray:
        """Places in ``at`` of rows that follow a grammar."""
        return np.flatnonzero(self._host[at, 6])

    def prompt_scoring(self, at: IntArray) -> list[tuple[int, PromptScoring]]:
        """Places in ``at`` of rows whose prompts are scored, and what they want."""
        wanted = self._prompts[at]
        return [(int(i), wanted[i]) for i in np.flatnonzero(wanted != None)]  # noqa: E711

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor, filtered: bool) -> Tensor:
        """A token of each row; ``filtered``: some ask for top-k, top-p or min-p."""
        temperature, top_p, top_k, min_p = self._settings[rows].unbind(dim=1)
        scaled = logits / temperature[:, None]
        if filtered:
            scaled = _filter(scaled, top_p, top_k, min_p)
        return (scaled + gumbel_noise(self._seeds[rows], positions, logits.shape[1])).argmax(-1)

    def _end_reasoning(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Put in the token that ends the reasoning of rows which have used up their budget."""
        end = self._think_end[rows]
        late = (end >= 0) & (positions >= self._think_limit[rows])
        tokens = torch.where(late, end, tokens)
        self._think_end[rows] = torch.where(tokens == end, -1, end)
        return tokens

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
        self._stop_ids[row, : len(stop_ids)] = to_device(stop_ids, self._stop_ids.device)


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


def with_logprobs(logits: Tensor, tokens: Tensor, count: int) -> SampledTokens:
    """``tokens`` [S] under logits [S, V], each beside its ``count`` likeliest alternatives."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top: Any = logprobs.topk(count, dim=-1)
    return SampledTokens(tokens, chosen[:, 0], ranks, top.indices, top.values)
