"""One rank's step: compactions, then the forward, then sampling; in flight, and on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import HostCopy, Stopwatch, to_device
from kvserve.engine.messages import PromptLogprobs
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.engine.sampling.sampler import NO_TOKEN, SampledTokens
from kvserve.late import Late, Made
from kvserve.log import EngineDeadError, RequestError, SequenceError
from kvserve.outputs import Logprob
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput

if TYPE_CHECKING:
    from kvserve.engine.compression.compressor import Compressor
    from kvserve.engine.compression.event_runner import EventRunner
    from kvserve.engine.runner.cuda_graph import DecodeGraphs
    from kvserve.engine.runner.recorded_steps import RecordedSteps
    from kvserve.engine.sampling.grammar import SequenceGrammar, TokenMasks
    from kvserve.engine.sampling.logprobs import ScoredChunk

_confirm = Late("engine.runner.guesses:confirm")
_event_parts = Late("engine.compression.event_parts:EventParts")
_event_runner = Late("engine.compression.event_runner:EventRunner")
_keep_states = Late("engine.runner.guesses:keep_states")
_read_logprobs = Late("engine.sampling.logprobs:read_logprobs")
_score_prompts = Late("engine.sampling.logprobs:score_prompts")


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Tokens in the order of ``SchedulerOutput.sampled_rows``; log-probabilities where asked
    for."""

    token_ids: IntArray
    logprobs: list[dict[int, Logprob] | None] | None
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
            token_ids = found[0]
            if len(found) > 1:
                logprobs = _read_logprobs(found, self.wanted)
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


class ModelRunner:
    """Owns the model, the cache and the device's rows of one rank.

    All ranks of ``group`` launch the same steps. The first one samples and tells the others.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        batch: InputBatch,
        attention: AttentionBackend,
        group: RankGroup = ALONE,
        graphs: DecodeGraphs | RecordedSteps | None = None,
        *,
        overlaps: bool = False,
        statistics: Made[Any] | None = None,
        most_guesses: int = 0,
    ) -> None:
        """``overlaps``: a step may be launched before the one in front of it is collected.
        ``statistics``: of the model's queries, for policies that score by them.
        ``most_guesses``: a decoding row may compute so many tokens beside its newest one."""
        self.group = group
        self.graphs = graphs
        self.most_guesses = most_guesses
        self.model = model
        self.cache = cache
        self.batch = batch
        self.attention = attention
        self.policies: dict[int, Policy] = {}
        """By ``Events.policy_id``."""
        parts = model, cache, batch, attention, group, statistics
        self._events: Made[EventRunner] = Made(
            lambda: _event_runner(_event_parts(*parts), self.policies, overlaps=overlaps)
        )
        self._last: LaunchedStep | None = None
        self.force: Callable[[Tensor], Tensor] | None = None
        """Called with the positions ``[S]`` sampled for; its ids replace the sampler's."""
        self.on_scored: Callable[[int, int, Tensor], None] | None = None
        """Called with a sequence's id, the position of the first token that is predicted and logits
        [T, V], where a prompt is scored."""

    @property
    def compressor(self) -> Compressor:
        return self._events().compressor

    @torch.inference_mode()
    def rehearse(self, tokens: int) -> None:
        """Run the largest step on padding: ``tokens`` of a prompt, then a draw for every row."""
        batch = self.batch.padding(tokens)
        planned = self.attention.plan(batch)
        hidden = self.model(batch.positions, batch, self.cache, planned)
        rows = torch.arange(len(self.batch.last_token), device=hidden.device)
        rows = rows.repeat(1 + self.most_guesses)[: max(tokens, len(rows))]
        logits = self.model.logits(hidden[:1].expand(len(rows), -1))
        self.batch.sampling.draw(logits, rows, rows, filtered=True)

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start one step. Its parts run in the order of the message's fields."""
        # They name rows and tables as the last step left them. What they free, the rest may use.
        answers, watch, events = list[Tensor](), None, output.events
        if self._events.made is not None or events.compactions or events.observations:
            answers, watch = self._events().run(events)
        step = LaunchedStep(answers, watch, self.group.agree())
        if output.moves is not None:
            self.cache.swap(output.moves)
        try:
            self.batch.apply(output)
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            culprits = self.batch.unfit(output.admitted.requests)
            raise SequenceError(f"{type(error).__name__}: {error}", culprits) from error
        if output.num_tokens:
            self._forward(output, step)
        if self.group.rank == 0:
            step.send(self.batch.device)
        self._last = step
        return step

    def _forward(self, output: SchedulerOutput, step: LaunchedStep) -> None:
        """Run the step's tokens through the model, and sample for each row that has caught up."""
        rows = output.sampled_rows
        where: Tensor | slice
        if len(rows) == output.num_tokens == output.num_decoding:
            where, hidden = slice(len(rows)), self._hidden(output, None)
        else:
            where = to_device(rows, self.batch.device)
            hidden = self._sampled_hidden(output, step)
        if not len(rows):
            return
        logits = self.model.logits(hidden)
        positions = self.batch.num_computed[where]
        if output.drafts is not None:
            behind = np.zeros_like(rows)
            behind[: output.num_decoding_tokens] = output.drafts.behind
            positions = positions - to_device(behind, self.batch.device)
        if self.group.rank == 0:
            sampled = self._sample(output, step, logits, rows, positions)
            # Of logits that are no numbers any token may be chosen; the next step looks it up.
            token_ids = sampled.token_ids.clamp_(0, logits.shape[1] - 1)
            step.sampled = sampled.or_none(logits)
            token_ids = self.group.broadcast(token_ids)
        else:
            token_ids = self.group.broadcast(torch.empty_like(positions))
        if output.drafts is None:
            self.batch.last_token[where] = token_ids
        else:
            _confirm(self.model, self.cache, self.batch, output.drafts, rows, token_ids)

    def _sampled_hidden(self, output: SchedulerOutput, step: LaunchedStep) -> Tensor:
        """Hidden states [S, hidden] that are sampled from; also scores prompts.

        Places count the batch's tokens, then one for each pruned prompt.
        """
        decoded = output.num_decoding_tokens
        tokens = decoded + len(output.prefill.token_ids)
        chunks = np.concatenate([output.prefill.lengths, np.ones(len(output.pruned), np.int32)])
        ends = np.cumsum(chunks) + decoded - 1
        last = np.concatenate([np.arange(decoded), ends[output.sampled_chunks]])
        scores = self.batch.sampling.prompt_scoring(output.prefill.rows)
        wanted = np.arange(tokens) if scores else last[last < tokens]
        hidden = self._hidden(output, wanted)
        if scores:
            firsts = decoded + np.cumsum(output.prefill.lengths) - output.prefill.lengths
            asked = output.prefill, firsts, scores
            step.scored = _score_prompts(self.model.logits, hidden, *asked, self.on_scored)
        places = np.concatenate([wanted, tokens + np.arange(len(output.pruned))])
        if len(last) < len(places):
            hidden = hidden[to_device(np.searchsorted(places, last), hidden.device)]
        return hidden

    def _sample(
        self,
        output: SchedulerOutput,
        step: LaunchedStep,
        logits: Tensor,
        rows: IntArray,
        positions: Tensor,
    ) -> SampledTokens:
        """Tokens for the sampled rows: logits [S, V], positions [S] of what is sampled."""
        step.grammars = self.batch.sampling.grammars(rows)
        allowed: TokenMasks | None = None
        if step.grammars:
            if self._last is not None:
                self._last.collect()  # a mask depends on the token before
            # On a GPU the forward is still running while the host works out the masks.
            allowed = step.grammars[0][1].allowed(step.grammars, logits)
        argmax = self.model.operators.argmax
        sampled = self.batch.sampling.sample(logits, rows, positions, allowed, argmax)
        step.wanted = self.batch.sampling.wants_logprobs(rows)
        return sampled if self.force is None else SampledTokens(self.force(positions))

    def _hidden(self, output: SchedulerOutput, wanted: IntArray | None) -> Tensor:
        """Hidden states of the batch's ``wanted`` tokens (``None``: all), then of each pruned
        prompt's last one. Decoding steps are replayed, if they were captured or recorded."""
        hidden, drafts, logs = list[Tensor](), output.drafts, output.logs_queries
        replayed = None
        if self.graphs is not None and not len(output.prefill.rows):
            if drafts is None:
                replayed = self.graphs.decode(output.num_decoding, logs)
            elif not self.model.spec.states:
                replayed = self.graphs.chunks(drafts.lengths, drafts.token_ids, logs)
        if replayed is not None:
            hidden.append(replayed)
        elif output.num_decoding or len(output.prefill.rows):
            input_ids, batch = self.batch.build(output)
            planned, at = self.attention.plan(batch), None
            if drafts is not None and self.model.spec.states:
                _keep_states(self.model, drafts)
            if wanted is not None and len(wanted) < len(input_ids):
                at = to_device(wanted, input_ids.device)
            hidden.append(self.model(input_ids, batch, self.cache, planned, at))
        for task in output.pruned:
            hidden.append(self._events().compute_pruned(task, logs_queries=logs))
        return torch.cat(hidden)
