"""What becomes of a step that failed: some sequences end, all others compute their caches again."""

from __future__ import annotations

import torch

from kvserve.engine.compression.event_runner import EventMemoryError
from kvserve.engine.core.open_sequences import OpenSequences
from kvserve.engine.messages import INTERNAL_ERROR, FinishedSequence, RefusedSequence
from kvserve.late import Made
from kvserve.log import SequenceError, logger
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.recovery import Suspects, culprits, newest_of, start_over
from kvserve.scheduler.step.scheduler import Scheduler

Ended = tuple[list[RefusedSequence], list[FinishedSequence]]
"""Sequences that the failure ends, and others that have ended."""


def contain(
    error: Exception,
    scheduler: Scheduler,
    sequences: OpenSequences,
    suspects: Made[Suspects],
    known: SchedulerOutput | None,
    token_ids: IntArray | None,
) -> Ended:
    """End the sequences that made a step fail, if it is known who did; all others recompute their
    caches, half of them later if it is not known yet (``Suspects``).

    ``known`` and ``token_ids`` are the step before and its tokens, if it was collected.
    """
    blamed = set(error.seq_ids if isinstance(error, SequenceError) else culprits(scheduler))
    aside: set[int] = set()
    if not blamed:
        running = scheduler.running or list(scheduler.waiting)[:1]
        blamed, aside = suspects().narrow(running, scheduler)
    ended, finished = start_over(scheduler, blamed, known, token_ids, aside)
    if blamed:
        suspects().clear(scheduler)
    names = ", ".join(sequences.request_id(seq) for seq in ended)
    to_blame = f"request {names or '(ended already)'} ends with an error"
    searched = f"whose fault it is gets searched for, {len(aside)} requests are set aside"
    logger.error(
        "a step failed: %s and %d sequences begin anew",
        to_blame if blamed else searched,
        len(scheduler.waiting),
        exc_info=error,
    )
    _forget_frames(error)
    refused = [RefusedSequence(seq.seq_id, INTERNAL_ERROR, None, "internal_error") for seq in ended]
    for seq in ended:
        sequences.end(seq)
    return refused, [sequences.end(seq) for seq in finished]


def shed(
    error: torch.OutOfMemoryError,
    scheduler: Scheduler,
    sequences: OpenSequences,
    output: SchedulerOutput,
) -> Ended:
    """End the newest sequence of a step that ran out of memory; the others are recomputed."""
    _forget_frames(error)
    among = error.seq_ids if isinstance(error, EventMemoryError) else None
    newest = newest_of(scheduler, output, among)
    blamed = set() if newest is None else {newest.seq_id}
    _, finished = start_over(scheduler, blamed)
    logger.error(
        "a step of %d tokens ran out of memory: request %s ends with an error and %d sequences "
        "begin anew; lower --gpu-memory-utilization or --max-num-batched-tokens (%s)",
        output.num_tokens,
        "(ended already)" if newest is None else sequences.request_id(newest),
        len(scheduler.waiting),
        error,
    )
    message = (
        f"the engine ran out of memory in a step of {output.num_tokens} tokens, and gave up "
        "its newest sequence, or the newest of those whose events wanted it; try again later"
    )
    refused = []
    if newest is not None:
        sequences.end(newest)
        refused.append(RefusedSequence(newest.seq_id, message, None, "out_of_memory"))
    return refused, [sequences.end(seq) for seq in finished]


def _forget_frames(error: Exception) -> None:
    """Drop an error's traceback, which keeps the failed step's tensors alive.

    The traceback refers to the frame that holds ``error``: only a garbage collection would free
    this cycle.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None
