"""The sequences in the engine: whose they are, how long they waited, what each says at its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvserve.engine.cache.entry_store import block_bytes, remainder_bytes, score_bytes
from kvserve.engine.messages import FinishedSequence, NewSequence
from kvserve.engine.runner.executor import Executor
from kvserve.late import Made
from kvserve.log import logger
from kvserve.outputs import KVCacheDetails, SpeculationDetails
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.scheduler import Scheduler

if TYPE_CHECKING:
    from kvserve.engine.core.kv_trace import KVTracer
    from kvserve.engine.sampling.grammar import GrammarCompiler


@dataclass(slots=True)
class _OpenSequence:
    sequence: Sequence
    request_id: str
    waiting_since: float | None
    """``None`` once it was admitted; a return from preemption does not count."""
    queued_seconds: float = 0.0


class OpenSequences:
    """From intake to their end, which frees what they hold outside of the pool."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tracer: Made[KVTracer],
        grammars: Made[GrammarCompiler],
    ) -> None:
        self._open: dict[int, _OpenSequence] = {}
        self._scored: set[int] = set()
        """Those whose policies keep scores from event to event."""
        self._speculates = scheduler.speculation is not None
        self._policies = executor.runner.policies
        self._executor = executor
        self._tracer = tracer
        self._grammars = grammars
        # The scheduler's layout has the heads of all ranks.
        layout = scheduler.layout
        form = executor.runner.cache.form
        self.block_bytes = block_bytes(layout, form)
        self.remainder_bytes, self._layout = remainder_bytes(layout), layout
        table = executor.runner.model.entry_table
        self._entry_table = table.name if form.few and table is not None else ""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Sequence]:
        return (each.sequence for each in self._open.values())

    def add(self, sequence: Sequence, new: NewSequence) -> None:
        """Begin to follow a sequence that waits to be admitted."""
        self._open[new.seq_id] = _OpenSequence(sequence, new.request_id, time.monotonic())
        if self._policies[sequence.policy_id].demands.kept_scores:
            self._scored.add(new.seq_id)
        if new.kv_trace:
            self._tracer().add(new.seq_id, sequence.max_len)

    def of_ids(self, seq_ids: Iterable[int]) -> list[Sequence]:
        """The sequences with these ids that are still there."""
        return [self._open[seq_id].sequence for seq_id in seq_ids if seq_id in self._open]

    def request_id(self, seq: Sequence) -> str:
        return self._open[seq.seq_id].request_id

    def note_admitted(self, admitted: Iterable[int]) -> None:
        """Record how long each of the sequences with these ids waited, if it was new."""
        now = time.monotonic()
        for seq_id in admitted:
            known = self._open.get(seq_id)
            if known is not None and known.waiting_since is not None:
                known.queued_seconds, known.waiting_since = now - known.waiting_since, None

    def end(self, seq: Sequence) -> FinishedSequence:
        """Forget a sequence that has ended, and free what it held outside the pool; its report."""
        if self._tracer.made is not None:
            self._tracer.made.drop(seq.seq_id)
        if seq.seq_id in self._scored:
            self._scored.discard(seq.seq_id)
            if not self._scored:
                self._executor.forget_scores()
        if seq.sampling is not None and seq.sampling.grammar is not None:
            seq.sampling = None
            self._grammars().count_ended()
        known = self._open.pop(seq.seq_id, None)
        assert seq.finish_reason is not None
        if seq.finish_reason == "length" and seq.num_tokens < seq.max_len:
            logger.warning(
                "an answer ended after %d tokens, before its limit: the pool holds no more of it "
                "(--kv-cache-memory, --num-gpu-blocks-override, or a --policy)",
                seq.num_tokens - seq.num_prompt_tokens,
            )
        speculation = None
        if self._speculates:
            counts = seq.guesses.num_drafted, seq.guesses.num_accepted
            speculation = SpeculationDetails(*counts, seq.guesses.refused)
        return FinishedSequence(
            *(seq.seq_id, seq.finish_reason, seq.stop_token, seq.num_cached_tokens),
            self._details(seq),
            0.0 if known is None else known.queued_seconds,
            speculation,
        )

    def _details(self, seq: Sequence) -> KVCacheDetails:
        """What a sequence held of its cache when it last left its row."""
        blocks, policy = seq.usage.held_blocks, self._policies[seq.policy_id]
        return KVCacheDetails(
            policy=policy.name,
            logical_tokens=seq.usage.logical_tokens,
            held_tokens=seq.usage.held_tokens,
            held_entries=seq.usage.held_entries,
            evicted_tokens=seq.usage.logical_tokens - seq.usage.held_tokens,
            compactions=seq.usage.compactions,
            blocks_released=seq.usage.blocks_released,
            peak_blocks=seq.usage.peak_blocks,
            held_bytes=(blocks.total() - blocks["log"]) * self.block_bytes
            + bool(seq.usage.remainder_entries) * self.remainder_bytes,
            window_bytes=blocks["windows"] * self.block_bytes,
            log_bytes=blocks["log"] * self.block_bytes
            + score_bytes(self._layout, policy.demands.kept_scores),
            resumed_tokens=0 if seq.talk.resumed is None else seq.talk.resumed.num_tokens,
            remainder_entries=seq.usage.remainder_entries,
            entry_table=self._entry_table,
            **seq.usage.held_counts,
        )
