"""Tells the gate what a step has taken."""

from __future__ import annotations

from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.scheduler import Scheduler


def tell_gate(
    scheduler: Scheduler, output: SchedulerOutput, seconds: float, compacting: float
) -> None:
    """``output`` took ``seconds``, ``compacting`` of these its events. Steps that verify guesses
    say nothing of what an entry costs."""
    gate, decoding = scheduler.events.gate, output.num_decoding
    if gate is None:
        return
    if output.compactions:
        queries = sum(int(task.plan.num_scored_queries.sum()) for task in output.compactions)
        gate.record_events(queries, compacting)
    elif decoding == output.num_tokens > 0:
        entries = int(scheduler.blocks.kv_lens[:, :decoding].mean(axis=(0, 2)).sum())
        gate.record_step(decoding, entries, seconds)
