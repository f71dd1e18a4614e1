"""The engine core: scheduler and runner over one model, in tokens. It knows no text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvserve.config import EngineConfig
from kvserve.engine.core.build import Tell, build_engine, untold
from kvserve.engine.core.engine_stats import EngineCounts
from kvserve.engine.core.intake import Intake
from kvserve.engine.core.open_sequences import OpenSequences
from kvserve.engine.messages import (
    EngineInfo,
    FinishedSequence,
    NewSequence,
    PolicyOffer,
    RefusedSequence,
    StepOutputs,
)
from kvserve.engine.models.hub import LOADING
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunnerOutput
from kvserve.engine.sampling.sampler import NO_TOKEN
from kvserve.late import Late, Made
from kvserve.log import EngineDeadError, RequestError
from kvserve.outputs import Compaction
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.engine.core.kv_trace import KVTracer, TracedMove
    from kvserve.engine.sampling.grammar import GrammarCompiler
    from kvserve.engine.sampling.grammar_backends import Matcher
    from kvserve.scheduler.step.recovery import Suspects

_STATS_INTERVAL = 0.05
_DEVICE_ERROR: tuple[type[Exception], ...] = tuple(
    found for found in (getattr(torch, "AcceleratorError", None),) if found is not None
)
# What follows those sequences that ask for it, and looks for those to blame.
_compiler = Late("engine.sampling.grammar:GrammarCompiler")
_tracer = Late("engine.core.kv_trace:KVTracer")
_new_suspects = Late("scheduler.step.recovery:Suspects")
contain = Late("engine.core.containment:contain")
shed = Late("engine.core.containment:shed")
NOT_FINITE = (
    "the logits of this answer's next token are not finite numbers: the model's weights, or what "
    "it computed in this --dtype, hold infinity or NaN"
)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched or has failed; ``output`` is ``None`` if scheduling it failed."""

    output: SchedulerOutput | None
    compactions: list[tuple[int, Compaction]]
    launched: LaunchedStep | Exception
    traced: list[TracedMove]


class EngineCore:
    """``add``, ``step`` while ``has_work``, ``abort``; ``ConfigError`` if it cannot start.

    ``tell`` is called with what it does while it starts.
    """

    def __init__(
        self, config: EngineConfig, model: Transformer | None = None, tell: Tell = untold
    ) -> None:
        with LOADING:
            built = build_engine(config, model, tell)
        self.scheduler = built.scheduler
        self.executor = built.executor
        self.runner = built.executor.runner
        self.grammars: Made[GrammarCompiler] = Made(lambda: _compiler(config.model, built.info))
        self._tracer: Made[KVTracer] = Made(lambda: _tracer(self.runner))
        self._intake = Intake(built, self.grammars, self._tracer)
        self._sequences = OpenSequences(self.scheduler, self.executor, self._tracer, self.grammars)
        sizes = self._sequences.block_bytes, self._sequences.remainder_bytes
        self._counts = EngineCounts(self.scheduler, self.runner, *sizes)
        self._stats_due = 0.0
        layout = self.scheduler.layout
        self.info: EngineInfo = replace(
            built.info, token_bytes=self._sequences.block_bytes * layout.groups // layout.block_size
        )
        self._summary = built.summary
        self._overlaps = built.plan.overlaps
        self._in_flight: StepInFlight | None = None
        self._suspects: Made[Suspects] = Made(_new_suspects)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None or bool(self._suspects.made)

    def add(self, new: NewSequence, matcher: Matcher | None = None) -> None:
        """Queue a sequence, or raise ``RequestError`` saying what is wrong with it.

        ``matcher`` is the sequence's grammar if it is compiled already.
        """
        sequence = self._intake.sequence(new, self._sequences, matcher)
        self.scheduler.add(sequence)
        self._sequences.add(sequence, new)
        if not new.branch:  # once a request, as in its usage
            self.scheduler.totals.prompt_tokens_total += sequence.num_prompt_tokens

    def abort(self, seq_ids: Iterable[int]) -> list[FinishedSequence]:
        """End sequences now; their blocks are free on return. Unknown ids are ignored."""
        known = self._sequences.of_ids(seq_ids)
        for seq in known:
            if (suspects := self._suspects.made) is not None and suspects.remove(seq):
                seq.status, seq.finish_reason = SequenceStatus.FINISHED, "abort"
            else:
                self.scheduler.finish(seq, "abort")
        return [self._sequences.end(seq) for seq in known]

    def described(self) -> EngineInfo:
        """``info`` with the start-up table."""
        return replace(self.info, summary=self._summary())

    def offers(self) -> list[PolicyOffer]:
        """What requests may choose as ``kv_policy``."""
        return self._intake.policies().offers()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block and continuation; what running sequences hold stays theirs."""
        self.scheduler.blocks.clear_cached()

    def step(self) -> StepOutputs:
        """Wait for a step and report its tokens; where steps overlap, start the next one first."""
        step = self._in_flight or self._launch()
        self._in_flight = None
        if isinstance(step.launched, torch.OutOfMemoryError) and step.output is not None:
            return self._shed(step.output, step.launched)
        if isinstance(step.launched, Exception):
            return self._contain(step.launched)
        assert step.output is not None, "what was not scheduled was not launched"
        if self._overlaps and self.scheduler.has_work and self.scheduler.may_overlap(step.output):
            self._in_flight = self._launch()
        try:
            with self.executor.together():
                result = step.launched.collect()
        except Exception as error:
            self._in_flight = None  # the next step was launched on top of this one
            self._check_containable(error)
            return self._contain(error)
        return self._take_in(step, result)

    def _launch(self) -> StepInFlight:
        output, compactions, traced = None, list[tuple[int, Compaction]](), list["TracedMove"]()
        launched: LaunchedStep | Exception
        try:
            output = self.scheduler.schedule()
            if output.admitted.requests:
                self._sequences.note_admitted(seq.seq_id for seq in output.admitted.requests)
            compactions = self._counts.add(output)
            if (tracer := self._tracer.made) is not None and tracer.followed:
                traced = tracer.begin_step(output)
            with self.executor.together():
                launched = self.executor.launch(output)
        except Exception as error:
            launched = error
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                launched = torch.OutOfMemoryError(str(error))  # of a CPU, as torch has it for a GPU
            self._check_containable(launched)
        return StepInFlight(output, compactions, launched, traced)

    def _check_containable(self, error: Exception) -> None:
        """Raise ``error`` again if it has to end the engine.

        That is so with several ranks (the others cannot undo their part of the step), on a broken
        device, and if there is no request that could be to blame.
        """
        broken = isinstance(error, (EngineDeadError, *_DEVICE_ERROR))
        if broken or not self.scheduler.has_work or self.runner.group.size > 1:
            raise error

    def _take_in(self, step: StepInFlight, result: ModelRunnerOutput) -> StepOutputs:
        """Give a step's results to the scheduler. A sequence that ended meanwhile gets no token."""
        output = step.output
        assert output is not None
        following = self._in_flight
        if following is not None and following.output is None:
            # Scheduling the next step failed half way: of the scheduler's state only the tokens
            # are still reliable.
            self._in_flight = None
            assert isinstance(following.launched, Exception)
            return self._contain(following.launched, output, result)
        self.scheduler.totals.compaction_seconds_total += result.compaction_seconds
        traced = self._tracer().read(step.traced) if step.traced else []
        sampled, token_ids = list(output.sampled), result.token_ids
        confirmed = None if output.drafts is None else self.scheduler.confirm(output, token_ids)
        if confirmed is not None:
            sampled, result = confirmed.owners(sampled), result.part(confirmed.at)
        refused = self._end_failed(sampled, result)
        gets = [seq.status is not SequenceStatus.FINISHED for seq in sampled]
        finished = self.scheduler.update(output, token_ids, result.scores, confirmed)
        outputs = self._tokens_of(sampled, result, gets)
        suspects = self._suspects.made
        if suspects is not None and (suspects.tried or suspects.aside):
            suspects.passed(self.scheduler)
        return replace(
            outputs,
            refused=refused,
            finished=[self._sequences.end(seq) for seq in finished],
            stats=self._stats_when_due(),
            compactions=step.compactions,
            traced=traced,
        )

    def _tokens_of(
        self, sampled: Iterable[Sequence], result: ModelRunnerOutput, gets: list[bool]
    ) -> StepOutputs:
        """A step's tokens, each of the one of ``sampled``, where ``gets`` is true."""
        token_ids = list(compress(result.token_ids.tolist(), gets))
        self.scheduler.totals.generation_tokens_total += len(token_ids)
        return StepOutputs(
            seq_ids=[seq.seq_id for seq in compress(sampled, gets)],
            token_ids=token_ids,
            logprobs=result.logprobs and list(compress(result.logprobs, gets)),
            prompt_logprobs=result.prompt_logprobs,
        )

    def _end_failed(
        self, sampled: list[Sequence], result: ModelRunnerOutput
    ) -> list[RefusedSequence]:
        """End those of ``sampled`` whose grammar failed in this step, or whose logits are no
        numbers."""
        failed = list(result.failed_grammars)
        for place in np.flatnonzero(result.token_ids == NO_TOKEN).tolist():
            failed.append((place, RequestError(NOT_FINITE, code="internal_error")))
        refused = []
        for place, error in failed:
            seq = sampled[place]
            if seq.status is not SequenceStatus.FINISHED:
                self.scheduler.finish(seq, "error")
                self._sequences.end(seq)
                refused.append(RefusedSequence(seq.seq_id, str(error), error.param, error.code))
        return refused

    def _contain(
        self,
        error: Exception,
        known: SchedulerOutput | None = None,
        result: ModelRunnerOutput | None = None,
    ) -> StepOutputs:
        """End those that made a step fail, and let all others begin anew (``contain``).

        ``known`` and ``result`` are the step before, if it was collected: its tokens are passed on.
        """
        outputs, tokens = StepOutputs(), None
        if known is not None and result is not None:
            gets = [seq.status is not SequenceStatus.FINISHED for seq in known.sampled]
            outputs, tokens = self._tokens_of(known.sampled, result, gets), result.token_ids
        parts = self.scheduler, self._sequences, self._suspects
        refused, finished = contain(error, *parts, known, tokens)
        stats = self._stats_when_due()
        return replace(outputs, refused=refused, finished=finished, stats=stats)

    def _shed(self, output: SchedulerOutput, error: torch.OutOfMemoryError) -> StepOutputs:
        """End the newest sequence of a step that ran out of memory; the others are recomputed."""
        refused, finished = shed(error, self.scheduler, self._sequences, output)
        if self.runner.batch.device == "cuda":
            torch.cuda.empty_cache()
        return StepOutputs(finished=finished, refused=refused, stats=self._stats_when_due())

    def close(self) -> None:
        """End the other ranks and helpers; this core makes no further step."""
        if self.grammars.made is not None:
            self.grammars.made.close()
        self.executor.close()

    def stats(self) -> EngineStats:
        """Counters and the state of every running request."""
        names = {seq.seq_id: self._sequences.request_id(seq) for seq in self.scheduler.running}
        return self._counts.stats(names)

    def _stats_when_due(self) -> EngineStats | None:
        now = time.monotonic()
        if now >= self._stats_due or not self.has_work:
            self._stats_due = now + _STATS_INTERVAL
            return self.stats()
        return None
