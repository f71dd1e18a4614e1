"""One rank's step: compactions, then the forward, then sampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.event_runner import EventRunner
from kvserve.engine.compression.forwards import PrunedPrefill, QueryRecomputer
from kvserve.engine.compression.observer import Observer
from kvserve.engine.compression.query_statistics import QueryStatistics
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.launched_step import LaunchedStep, ScoredChunk
from kvserve.engine.runner.recorded_steps import RecordedSteps
from kvserve.engine.sampling.grammar import TokenMasks, allowed_bits
from kvserve.engine.sampling.sampler import PromptScoring, SampledTokens, with_logprobs
from kvserve.log import SequenceError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput

_SCORED_AT_ONCE = 256


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
        statistics: QueryStatistics | None = None,
        most_guesses: int = 0,
    ) -> None:
        """``overlaps``: a step may be launched before the one in front of it is collected.
        ``statistics``: of the model's queries, for policies that score by them. ``most_guesses``: a
        decoding row may compute so many tokens beside its newest one."""
        self.group = group
        self.graphs = graphs
        self.most_guesses = most_guesses
        self.model = model
        self.cache = cache
        self.batch = batch
        self.attention = attention
        self.policies: dict[int, Policy] = {}
        """By ``Events.policy_id``."""
        recomputer = QueryRecomputer(model, cache, batch, attention)
        left = batch.remainders
        sinks = model.sinks_of_full_layers
        observer = Observer(
            cache,
            model.scale,
            recomputer,
            group=group,
            remainders=left,
            sinks=sinks,
            centres=None if statistics is None else statistics.centres(model),
        )
        self.compressor = Compressor(cache, observer, batch.kept_scores, group, left)
        prefill = PrunedPrefill(model, cache, batch, attention, group)
        self._events = EventRunner(
            batch, self.compressor, prefill, self.policies, group, overlaps=overlaps
        )
        self._last: LaunchedStep | None = None
        self.force: Callable[[Tensor], Tensor] | None = None
        """Called with the positions ``[S]`` sampled for; its ids replace the sampler's."""
        self.on_scored: Callable[[int, int, Tensor], None] | None = None
        """Called with a sequence's id, the position of the first token that is predicted and logits
        [T, V], where a prompt is scored."""

    @property
    def workspace_bytes(self) -> int:
        """Memory beside the pool: what scoring takes at most, unless a single window needs more,
        and scores kept for later events."""
        return self.compressor.observer.scratch_bytes + self.batch.kept_scores.nbytes

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
        if len(output.events.turns.rows):
            self.batch.begin_turns(output.events.turns)
        # They name rows and tables as the last step left them. What they free, the rest may use.
        step = LaunchedStep(*self._events.run(output.events), self.group.agree())
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
            self.batch.confirm(output.drafts, rows, token_ids)

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
        step.scored = self._score_prompts(output, hidden, scores)
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
        allowed = None
        if step.grammars:
            if self._last is not None:
                self._last.collect()  # a mask depends on the token before
            # On a GPU the forward is still running while the host works out the masks.
            bits = allowed_bits(step.grammars, logits.shape[1])
            places = [place for place, _ in step.grammars]
            allowed = TokenMasks.of(places, bits, logits.device)
        argmax = self.model.operators.argmax
        sampled = self.batch.sampling.sample(logits, rows, positions, allowed, argmax)
        step.wanted = self.batch.sampling.wants_logprobs(rows)
        return sampled if self.force is None else SampledTokens(self.force(positions))

    def _hidden(self, output: SchedulerOutput, wanted: IntArray | None) -> Tensor:
        """Hidden states of the batch's ``wanted`` tokens (``None``: all), then of each pruned
        prompt's last one. Decoding steps are replayed, if they were captured or recorded."""
        hidden, drafts, logs = list[Tensor](), output.drafts, output.logs_queries
        steps = None if len(output.prefill.rows) else self.graphs
        if steps is not None and drafts is None and steps.hold(output.num_decoding):
            hidden.append(steps.decode(output.num_decoding, logs))
        elif steps is not None and drafts is not None and steps.hold_chunks(drafts.lengths):
            token_ids = to_device(drafts.token_ids, self.batch.device)
            hidden.append(steps.chunks(drafts.lengths, token_ids, logs))
        elif output.num_decoding or len(output.prefill.rows):
            input_ids, batch = self.batch.build(output)
            planned, at = self.attention.plan(batch), None
            if wanted is not None and len(wanted) < len(input_ids):
                at = to_device(wanted, input_ids.device)
            hidden.append(self.model(input_ids, batch, self.cache, planned, at))
        for task in output.pruned:
            hidden.append(self._events.compute_pruned(task, logs_queries=logs))
        return torch.cat(hidden)

    def _score_prompts(
        self, output: SchedulerOutput, hidden: Tensor, wanted: list[tuple[int, PromptScoring]]
    ) -> list[ScoredChunk]:
        """Log-probabilities of the prompt tokens that follow those of the ``wanted`` chunks."""
        prefill = output.prefill
        firsts = output.num_decoding_tokens + np.cumsum(prefill.lengths) - prefill.lengths
        scored = []
        for i, prompt in wanted:
            start, first = int(prefill.starts[i]) + 1, int(firsts[i])
            targets = prompt.token_ids[start : start + int(prefill.lengths[i])]
            # In pieces: the logits of a whole chunk may take more memory than the model.
            for at in range(0, len(targets), _SCORED_AT_ONCE):
                ids = to_device(targets[at : at + _SCORED_AT_ONCE], hidden.device)
                logits = self.model.logits(hidden[first + at : first + at + len(ids)])
                if self.on_scored is not None:
                    self.on_scored(prompt.seq_id, start + at, logits)
                tokens = with_logprobs(logits, ids, prompt.count)
                scored.append(ScoredChunk(prompt.seq_id, start + at, tokens, prompt.count))
        return scored
