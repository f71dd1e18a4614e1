"""A step in flight, and its results on the host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from kvserve.engine.device.transfer import HostCopy, Stopwatch
from kvserve.engine.messages import PromptLogprobs
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.engine.sampling.sampler import NO_TOKEN, SampledTokens
from kvserve.log import EngineDeadError, RequestError
from kvserve.outputs import Logprob
from kvserve.scheduler.arrays import IntArray

TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Tokens in the order of ``SchedulerOutput.sampled_rows``; log-probabilities where asked
    for."""

    token_ids: IntArray
    logprobs: list[TokenLogprobs | None] | None
    scores: list[IntArray]
    """The answer to each of ``ScheduledEvents.observations``."""
    prompt_logprobs: list[PromptLogprobs]
    compaction_seconds: float
    failed_grammars: list[tuple[int, RequestError]] = field(default_factory=list)
    """Places in ``token_ids`` whose grammar failed, each with its error."""

    def part(self, at: IntArray) -> ModelRunnerOutput:
        """The tokens in the places ``at`` alone; each grammar's is among them."""
        places = {place: i for i, place in enumerate(at.tolist())}
        return replace(
            self,
            token_ids=self.token_ids[at],
            logprobs=self.logprobs and [self.logprobs[place] for place in places],
            failed_grammars=[(places[place], error) for place, error in self.failed_grammars],
        )


@dataclass(slots=True)
class LaunchedStep:
    """A step in flight: its results, on their way from the device to the host."""

    events: list[Tensor]
    """The answer to each of ``ScheduledEvents.observations``."""
    compacting: Stopwatch | None
    agreed: Tensor | None
    """Whether all ranks hold and keep the same; ``None`` if there was nothing to compare."""
    sampled: SampledTokens | None = None
    wanted: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    scored: list[ScoredChunk] = field(default_factory=list)
    grammars: list[tuple[int, SequenceGrammar]] = field(default_factory=list)
    _copy: HostCopy | None = None
    _output: ModelRunnerOutput | None = None

    def send(self, device: str) -> None:
        """Start the copy to the host, behind this step on ``device`` and before the next one."""
        tensors = [*self.events, *([] if self.sampled is None else self.sampled.tensors)]
        tensors += [tensor for chunk in self.scored for tensor in chunk.tokens.tensors]
        self._copy = HostCopy(tensors if self.agreed is None else [self.agreed, *tensors], device)

    def collect(self) -> ModelRunnerOutput:
        """Wait for the step. Later calls return the same output."""
        if self._output is not None:
            return self._output
        assert self._copy is not None
        arrays = iter(self._copy.wait())
        if self.agreed is not None and not next(arrays):
            raise EngineDeadError(
                "the tensor-parallel ranks no longer hold the same entries, so their answers would "
                "be wrong; please report it"
            )
        scores = [next(arrays) for _ in self.events]
        token_ids: IntArray = np.zeros(0, np.int32)
        logprobs = None
        if self.sampled is not None:
            found = [next(arrays) for _ in self.sampled.tensors]
            token_ids, logprobs = found[0], _logprobs(found, self.wanted)
        prompts = [
            chunk.read([next(arrays) for _ in chunk.tokens.tensors]) for chunk in self.scored
        ]
        seconds = 0.0 if self.compacting is None else self.compacting.seconds()
        # Last, when nothing can fail any more: a grammar cannot take back a token.
        for place, grammar in self.grammars:
            if token_ids[place] != NO_TOKEN:
                grammar.accept(int(token_ids[place]))
        failed = [(place, each.failure) for place, each in self.grammars if each.failure]
        self.grammars = []  # those of sequences that have ended are freed before the next step
        self._output = ModelRunnerOutput(token_ids, logprobs, scores, prompts, seconds, failed)
        return self._output


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


def _logprobs(
    found: list[np.ndarray[Any, Any]], wanted: IntArray
) -> list[TokenLogprobs | None] | None:
    """Log-probabilities by row, from ``SampledTokens.tensors`` on the host; ``None`` if none."""
    if len(found) == 1:
        return None
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
