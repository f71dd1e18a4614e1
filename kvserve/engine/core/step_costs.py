"""Tells the gate and speculation what a step has taken."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.scheduler import Scheduler


def step_clock(device: str, ranks: int) -> Callable[[], float]:
    """What steps with guesses are compared by: the CPU time of this thread where it computes, which
    other processes disturb less than they do the wall clock."""
    return time.thread_time if device == "cpu" and ranks == 1 else time.perf_counter


def tell_speculation(
    scheduler: Scheduler, output: SchedulerOutput, tokens: int, seconds: float
) -> None:
    """``output`` took ``seconds``, taking in its results among them; sequences got ``tokens``."""
    speculation, rows = scheduler.speculation, output.num_decoding
    guesses = output.drafts is not None
    if speculation is None or not (guesses or speculation.costs.measures(rows)):
        return
    alone = output.num_decoding_tokens == output.num_tokens > 0
    if not alone or output.compactions or output.observations:
        return
    guessed = 0 if output.drafts is None else output.drafts.num_guessed
    speculation.costs.record(rows, guessed, tokens, seconds)


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
