"""Which request makes steps fail: found by halves, so that it alone ends."""

from __future__ import annotations

from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.scheduler import Scheduler


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
