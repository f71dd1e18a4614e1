"""Tells the gate and speculation what a step has taken."""

from __future__ import annotations

from kvserve.scheduler.compression.gate import BreakEvenGate
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.scheduler import Scheduler


def record_costs(
    scheduler: Scheduler, output: SchedulerOutput, tokens: int, seconds: float, compacting: float
) -> None:
    """``output`` took ``seconds``, ``compacting`` of these its events; sequences got ``tokens``."""
    gate, speculation = scheduler.events.gate, scheduler.speculation
    if gate is not None:
        _tell_gate(gate, scheduler, output, seconds, compacting)
    alone = output.num_decoding_tokens == output.num_tokens > 0
    if output.draft_chunks is not None and output.draft_chunks.catches_up:
        alone = False
    if speculation is not None and alone and not output.compactions + output.observations:
        guessed = 0 if output.drafts is None else output.drafts.num_guessed
        speculation.costs.record(output.num_decoding, guessed, tokens, seconds)


def _tell_gate(
    gate: BreakEvenGate,
    scheduler: Scheduler,
    output: SchedulerOutput,
    seconds: float,
    compacting: float,
) -> None:
    """Steps that verify guesses say nothing of what an entry costs."""
    decoding = output.num_decoding
    if output.compactions:
        queries = sum(int(task.plan.num_scored_queries.sum()) for task in output.compactions)
        gate.record_events(queries, compacting)
    elif decoding == output.num_tokens > 0:
        entries = int(scheduler.blocks.kv_lens[:, :decoding].mean(axis=(0, 2)).sum())
        gate.record_step(decoding, entries, seconds)
