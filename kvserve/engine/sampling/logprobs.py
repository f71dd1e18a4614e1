"""Log-probabilities of tokens, and of prompts, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import PromptLogprobs
from kvserve.engine.sampling.sampler import PromptScoring, SampledTokens
from kvserve.outputs import Logprob
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import PrefillBatch

_AT_ONCE = 256
TokenLogprobs = dict[int, Logprob]


def with_logprobs(logits: Tensor, tokens: Tensor, count: int) -> SampledTokens:
    """``tokens`` [S] under logits [S, V], each beside its ``count`` likeliest alternatives."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top: Any = logprobs.topk(count, dim=-1)
    return SampledTokens(tokens, chosen[:, 0], ranks, top.indices, top.values)


def read_logprobs(
    found: list[np.ndarray[Any, Any]], wanted: IntArray
) -> list[TokenLogprobs | None]:
    """Log-probabilities by row, from ``SampledTokens.tensors`` on the host; ``None`` where fewer
    than none are ``wanted [S]``."""
    rows = zip(*(part.tolist() for part in found), wanted, strict=True)
    out: list[TokenLogprobs | None] = []
    for token, logprob, rank, top_ids, top_logprobs, count in rows:
        if count < 0:
            out.append(None)
            continue
        top = zip(top_ids[:count], top_logprobs[:count], range(1, count + 1), strict=True)
        entry = {token: Logprob(logprob, rank)}
        entry |= {i: Logprob(p, r) for i, p, r in top if i != token}
        out.append(entry)
    return out


@dataclass(slots=True)
class ScoredChunk:
    """Log-probabilities of prompt tokens ``[start, start + n)``, still on the device."""

    seq_id: int
    start: int
    tokens: SampledTokens
    count: int

    def read(self, found: list[np.ndarray[Any, Any]]) -> PromptLogprobs:
        """The log-probabilities, from ``found``: what ``tokens`` are on the host."""
        kinds = np.int32, np.float32, np.int32, np.int32, np.float32
        arrays = (part.astype(kind).tobytes() for part, kind in zip(found, kinds, strict=True))
        return PromptLogprobs(self.seq_id, self.start, self.count, *arrays)


def score_prompts(
    logits_of: Callable[[Tensor], Tensor],
    hidden: Tensor,
    prefill: PrefillBatch,
    firsts: IntArray,
    wanted: list[tuple[int, PromptScoring]],
    on_scored: Callable[[int, int, Tensor], None] | None,
) -> list[ScoredChunk]:
    """Log-probabilities of the prompt tokens that follow those of the ``wanted`` chunks, which
    begin at ``firsts`` in ``hidden``; ``on_scored`` as ``ModelRunner.on_scored``."""
    scored = []
    for i, prompt in wanted:
        start, first = int(prefill.starts[i]) + 1, int(firsts[i])
        targets = prompt.token_ids[start : start + int(prefill.lengths[i])]
        # In pieces: the logits of a whole chunk may take more memory than the model.
        for at in range(0, len(targets), _AT_ONCE):
            ids = to_device(targets[at : at + _AT_ONCE], hidden.device)
            logits = logits_of(hidden[first + at : first + at + len(ids)])
            if on_scored is not None:
                on_scored(prompt.seq_id, start + at, logits)
            tokens = with_logprobs(logits, ids, prompt.count)
            scored.append(ScoredChunk(prompt.seq_id, start + at, tokens, prompt.count))
    return scored
