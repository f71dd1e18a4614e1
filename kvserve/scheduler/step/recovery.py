"""Recovery from a step that failed: find the sequences to blame, and start over without them.

Half of a step may have been scheduled, so tables, reference counts and lengths may disagree. Only
the tokens of the rows are still reliable.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.step.admission import first_event
from kvserve.scheduler.step.scheduler import Scheduler


def culprits(scheduler: Scheduler) -> list[int]:
    """Ids of sequences whose trigger fails, or whose event takes entries that the row lacks."""
    found = []
    for seq in (*scheduler.running, *scheduler.waiting):
        try:
            sound = _is_sound(scheduler, seq)
        except Exception:
            sound = False
        if not sound:
            found.append(seq.seq_id)
    return found


def newest_of(
    scheduler: Scheduler, output: SchedulerOutput, among: Collection[int] | None
) -> Sequence | None:
    """The newest running sequence that computes something in ``output``, or of the ids ``among``;
    ``None`` if all have ended. A step that finds no memory ends it."""
    computed = (output.prefill.rows, *(task.rows for task in output.pruned))
    at = {*range(output.num_decoding), *np.concatenate(computed).tolist()}
    if among is None:
        computing = [seq for seq in scheduler.running if not at or seq.row in at]
    else:
        computing = [seq for seq in scheduler.running if seq.seq_id in among]
    return max(computing, key=lambda seq: seq.arrival, default=None)


def start_over(
    scheduler: Scheduler,
    blamed: Collection[int],
    known: SchedulerOutput | None = None,
    token_ids: IntArray | None = None,
    aside: Collection[int] = (),
) -> tuple[list[Sequence], list[Sequence]]:
    """Continue with the state of a fresh scheduler.

    The failure ends the ``blamed`` sequences with the reason ``error``. Those to be set ``aside``
    are left to the caller. All others compute their caches again, with the same events, and no
    cached or swapped block is used again: the device may have done any part of the step. ``known``
    and ``token_ids`` are the step before and its tokens, if these are there. Returns the sequences
    that the failure ends, and the others that have ended since the last step.
    """
    if known is not None and token_ids is not None:
        _learn(scheduler, known, token_ids)
    finished, alive = scheduler.departures.take_exhausted(), scheduler.running
    waiting = list(scheduler.waiting)
    for seq in alive:
        _take_tokens(scheduler, seq)
    for seq in waiting:
        if seq.awaits_token:  # that token is computed again with the cache
            seq.token_ids, seq.awaits_token = seq.token_ids[:-1], False
    ended = [seq for seq in (*alive, *waiting) if seq.seq_id in blamed]
    _replace(scheduler)
    scheduler.totals.preemptions_total += len(alive)
    for seq in sorted((*alive, *waiting), key=lambda seq: seq.arrival):
        if seq in ended:
            seq.status, seq.finish_reason = SequenceStatus.FINISHED, "error"
        elif _is_complete(seq):
            finished.append(seq)
        elif seq.seq_id not in aside:
            scheduler.add(seq)
    return ended, finished


def _is_sound(scheduler: Scheduler, seq: Sequence) -> bool:
    """Whether a sequence's trigger works, and its event takes only entries that the row holds."""
    if seq.row < 0:
        first_event(seq.num_prompt_tokens, seq.trigger)
        return True
    rows = scheduler.rows
    state = rows.state(np.array([seq.row]))
    seq.trigger.log_from(state, seq.trigger.next_event(state))
    if rows.num_computed[seq.row] < rows.next_event[seq.row]:
        return True
    return bool(seq.trigger.plan(state).is_within(state.kv_len).all())


def _learn(scheduler: Scheduler, output: SchedulerOutput, token_ids: IntArray) -> None:
    rows = scheduler.rows
    for seq, place, token in zip(output.sampled, output.sampled_at, token_ids, strict=True):
        if seq.status is SequenceStatus.RUNNING:
            rows.token_ids[seq.row, place] = token
            rows.num_unknown[seq.row] -= 1
        elif seq.awaits_token:
            seq.token_ids[-1], seq.awaits_token = token, False


def _take_tokens(scheduler: Scheduler, seq: Sequence) -> None:
    """Write a row's known tokens and counts to its sequence, and take the row away."""
    rows, row = scheduler.rows, seq.row
    rows.num_tokens[row] -= rows.num_unknown[row]
    seq.replay_until = max(seq.replay_until, int(rows.num_computed[row]))
    rows.save(seq)
    seq.row, seq.status, seq.awaits_token = -1, SequenceStatus.WAITING, False


def _replace(scheduler: Scheduler) -> None:
    """Give the scheduler all state of a fresh one; it goes on counting where it was."""
    fresh = Scheduler(scheduler.layout, scheduler.settings, scheduler.totals)
    fresh.saved.take_over(scheduler.saved)
    vars(scheduler).update(vars(fresh))


def _is_complete(seq: Sequence) -> bool:
    """Whether a sequence has its last token; if so, mark it as finished."""
    last = int(seq.token_ids[-1]) if seq.num_tokens > seq.num_prompt_tokens else -1
    stopped = last in seq.stop_token_ids
    if not stopped and seq.num_tokens < seq.max_len:
        return False
    seq.stop_token = last if stopped else None
    seq.status, seq.finish_reason = SequenceStatus.FINISHED, "stop" if stopped else "length"
    return True


class Suspects:
    """After a step that failed and blamed nobody, half of its sequences are set aside and the other
    half goes on. If a step with these fails too, they are halved again; if all of them get past
    where they were, those set aside last are tried next. A single one that is left is to blame.

    So n requests bear at most log2(n) + 1 failures for one that is bad, and none ends for it. A
    failure that does not come again ends nobody.
    """

    def __init__(self) -> None:
        self.tried: dict[int, int] = {}
        """Tokens that each suspect had when its step failed."""
        self.aside: list[list[Sequence]] = []

    def __bool__(self) -> bool:
        return bool(self.tried or self.aside)

    def narrow(self, running: list[Sequence], scheduler: Scheduler) -> tuple[set[int], set[int]]:
        """A step failed in which these ran: ids of who is to blame, and of who is set aside.

        They still hold their rows. If somebody is to blame, those set aside before are not.
        """
        suspects = [seq for seq in running if seq.seq_id in self.tried] or running
        if len(suspects) == 1:
            self.tried.clear()
            return {suspects[0].seq_id}, set()
        # What came last is suspected first, and waits: the others' streams go on.
        by_age = sorted(suspects, key=lambda seq: seq.arrival)
        older, newer = by_age[: len(by_age) // 2], by_age[len(by_age) // 2 :]
        self.tried = {seq.seq_id: _num_tokens(seq, scheduler) for seq in older}
        self.aside.append(newer)
        return set(), {seq.seq_id for seq in newer}

    def passed(self, scheduler: Scheduler) -> None:
        """A step succeeded: put those back whose turn it is."""
        there = {seq.seq_id: seq for seq in (*scheduler.running, *scheduler.waiting)}
        self.tried = {
            seq_id: before
            for seq_id, before in self.tried.items()
            if seq_id in there and _num_tokens(there[seq_id], scheduler) <= before
        }
        if not self.tried and self.aside:
            next_ones = self.aside.pop()
            self.tried = {seq.seq_id: seq.num_tokens for seq in next_ones}
            for seq in next_ones:
                scheduler.add(seq)

    def clear(self, scheduler: Scheduler) -> None:
        """Somebody was to blame: put all others back."""
        self.tried.clear()
        for seq in (seq for group in self.aside for seq in group):
            scheduler.add(seq)
        self.aside.clear()

    def remove(self, seq: Sequence) -> bool:
        """Forget a sequence that ends; whether it was set aside, so that no scheduler has it."""
        for group in self.aside:
            if seq in group:
                group.remove(seq)
                return True
        return False


def _num_tokens(seq: Sequence, scheduler: Scheduler) -> int:
    """Known tokens of a sequence, in its row or not."""
    if seq.row < 0:
        return seq.num_tokens
    return int(scheduler.rows.num_tokens[seq.row] - scheduler.rows.num_unknown[seq.row])
