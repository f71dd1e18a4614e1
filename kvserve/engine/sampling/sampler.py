"""From logits to tokens, for a whole batch at once.

Rules, stops and grammars change logits; ``kernels/sample`` filters and draws. What a request
samples depends neither on the batch it runs in nor on when its step is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import NewSequence
from kvserve.late import Late, Made
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import NewRequest

if TYPE_CHECKING:
    from kvserve.engine.sampling.grammar import SequenceGrammar, TokenMasks
    from kvserve.engine.sampling.logit_rules import LogitRules, RowRules

NO_TOKEN = -1
"""What the host gets in place of a token whose logits are no numbers."""
_argmax = Late("kernels.layer.elementwise:argmax")
_with_logprobs = Late("engine.sampling.logprobs:with_logprobs")
_logit_rules = Late("engine.sampling.logit_rules:LogitRules")
sample_tokens = Late("kernels.sample.sample_tokens:sample_tokens")


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
    """The token that ends the reasoning if its length is limited, else -1."""
    think_start: int = -1
    """If not -1, there is reasoning only if this is the first token."""
    think_limit: int = 0
    """Logical position at which ``think_end`` is forced if it was not sampled before."""
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

    def or_none(self, logits: Tensor) -> SampledTokens:
        """The same with ``NO_TOKEN`` for each row whose chosen logit [S, V] is no finite number."""
        found = logits.gather(1, self.token_ids[:, None])[:, 0].isfinite()
        return replace(self, token_ids=torch.where(found, self.token_ids, NO_TOKEN))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are there, in this order."""
        parts = self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs
        return [part for part in parts if part is not None]


class SamplingRows:
    """Sampling settings of all rows on the device; the host has copies of what decides the path."""

    def __init__(self, max_rows: int, vocab_size: int, device: str) -> None:
        # Temperature (0: greedy), top_p, top_k, min_p.
        self._settings = torch.zeros(max_rows, 4, dtype=torch.float32, device=device)
        # Seed, min_len, the token that ends a row's reasoning (-1: no limit, or it has ended), the
        # position where it is forced, and the token that begins it (-1: none), with its position.
        self._numbers = torch.zeros(max_rows, 6, dtype=torch.int64, device=device)
        self._stop_ids = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        self._rules: Made[LogitRules] = Made(lambda: _logit_rules(max_rows, vocab_size, device))
        # Host: random, filtered, has min_len, log-probabilities wanted (-1: none), has rules,
        # limits its reasoning, has a grammar.
        self._host: IntArray = np.zeros((max_rows, 7), np.int32)
        self._prompts: np.ndarray[Any, Any] = np.full(max_rows, None, object)
        self._grammars: np.ndarray[Any, Any] = np.full(max_rows, None, object)

    def set_rows(self, requests: Sequence[NewRequest]) -> None:
        """Take over the settings of newly admitted sequences (``NewRequest.sampling``)."""
        for seq in requests:
            s: RowSampling = seq.sampling
            temperature = max(s.temperature, 1e-5) if s.temperature > 0.0 else 0.0
            settings = temperature, s.top_p, float(s.top_k), s.min_p
            self._settings[seq.row] = to_device(settings, self._settings.device, torch.float32)
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
            self._prompts[seq.row], self._grammars[seq.row] = s.prompt, s.grammar
            self._set_stop_ids(seq.row, seq.stop_token_ids)
            if s.rules is not None or self._rules.made is not None:
                self._rules().set_row(seq, s.rules)
            output = seq.token_ids[seq.num_prompt_tokens :]
            plain = s.think_start >= 0 and len(output) > 0 and output[0] != s.think_start
            ended = plain or s.think_end in output
            reasoning = -1 if ended else s.think_end, s.think_limit, s.think_start
            numbers = s.seed, s.min_len, *reasoning, seq.num_prompt_tokens
            self._numbers[seq.row] = to_device(numbers, self._settings.device)

    def move_rows(self, to: IntArray, source: IntArray) -> None:
        self._host[to] = self._host[source]
        self._prompts[to] = self._prompts[source]
        self._grammars[to] = self._grammars[source]
        device = self._settings.device
        dst, src = (to_device(x, device) for x in (to, source))
        if self._rules.made is not None:
            self._rules.made.move_rows(to, source)
        for tensor in (self._settings, self._numbers, self._stop_ids):
            tensor[dst] = tensor[src]

    def sample(
        self,
        logits: Tensor,
        at: IntArray,
        positions: Tensor,
        allowed: TokenMasks | None = None,
        argmax: Callable[[Tensor], Tensor] = _argmax,
    ) -> SampledTokens:
        """logits: float32 [S, V] of rows ``at``; positions: [S], of the tokens being sampled.

        ``allowed`` is what the grammars of some of the S rows allow. ``argmax``: that of
        ``kvserve.kernels.layer.elementwise``, or another that does the same.
        """
        host, rows, raw = self._host[at], to_device(at, logits.device), logits
        if host[:, 4].any():
            logits = self._rules().apply(logits, at)
        if host[:, 2].any():
            logits = self._hold_back_stops(logits, rows, positions)
        if allowed is not None:
            logits = allowed.apply(logits)
        if host[:, 0].any():
            tokens = self.draw(logits, rows, positions, bool(host[:, 1].any()))
        else:
            tokens = argmax(logits)
        if host[:, 5].any():
            tokens = self._end_reasoning(tokens, rows, positions)
        if host[:, 4].any():
            self._rules().observe(tokens, at)
        wanted = int(host[:, 3].max(initial=-1))
        return _with_logprobs(raw, tokens, wanted) if wanted >= 0 else SampledTokens(tokens)

    def wants_logprobs(self, at: IntArray) -> IntArray:
        """How many alternatives each of the rows asked for, -1 for none."""
        wanted: IntArray = self._host[at, 3]
        return wanted

    def grammars(self, at: IntArray) -> list[tuple[int, SequenceGrammar]]:
        """Places in ``at`` of rows that follow a grammar, and which."""
        places = np.flatnonzero(self._host[at, 6])
        return [(place, self._grammars[at[place]]) for place in places.tolist()]

    def prompt_scoring(self, at: IntArray) -> list[tuple[int, PromptScoring]]:
        """Places in ``at`` of rows whose prompts are scored, and what they want."""
        if not len(at):
            return []
        wanted = self._prompts[at]
        return [(int(i), wanted[i]) for i in np.flatnonzero(wanted != None)]  # noqa: E711

    def draw(self, logits: Tensor, rows: Tensor, positions: Tensor, filtered: bool) -> Tensor:
        """A token for each row; ``filtered``: some rows ask for top-k, top-p or min-p."""
        seeds = self._numbers[rows, 0]
        drawn: Tensor = sample_tokens(logits, self._settings[rows], seeds, positions, filtered)
        return drawn

    def _end_reasoning(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Force the token that ends the reasoning in rows that have used up their budget."""
        end, limit, start, first = self._numbers[rows, 2:].unbind(1)
        undecided = (start >= 0) & (positions == first)
        late = (end >= 0) & (positions >= limit) & ~undecided
        tokens = torch.where(late, end, tokens)
        over = (tokens == end) | (undecided & (tokens != start))
        self._numbers[rows, 2] = torch.where(over, -1, end)
        return tokens

    def _hold_back_stops(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        ids = self._stop_ids[rows]
        held = (positions < self._numbers[rows, 1])[:, None] & (ids >= 0)
        return logits.scatter_add(1, ids.clamp(min=0), torch.where(held, -torch.inf, 0.0))

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = torch.nn.functional.pad(self._stop_ids, (0, missing), value=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(stop_ids)] = to_device(stop_ids, self._stop_ids.device)
