"""Departures: a sequence leaves its row because it has ended or is preempted."""

from __future__ import annotations

from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.step.settings import Parts
from kvserve.scheduler.triggers.trigger import NO_EVENT
from kvserve.stats import EngineStats


class Departures:
    """The counterpart of ``Admission``. A sequence that ends frees its blocks at once;
    ``drop_finished`` frees its row, between two steps.

    Preemption takes a sequence of the lowest priority; of these, the newest of the client that
    holds most rows. A compressed sequence is swapped to host memory if its blocks fit there; any
    other is computed again.
    """

    def __init__(self, parts: Parts, totals: EngineStats) -> None:
        self.totals = totals
        self._rows, self._blocks, self._waiting = parts.rows, parts.blocks, parts.waiting
        self._saved = parts.saved
        # Sequences that ended since the last step; those that exhausted the pool, which the next
        # ``update`` reports.
        self._finished: list[Sequence] = []
        self._exhausted: list[Sequence] = []

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now and free its blocks; the next step frees its row."""
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
            if seq in self._saved:
                self._saved.discard(seq)
        elif seq.status is SequenceStatus.RUNNING:
            self._rows.publish(seq, int(self._rows.num_computed[seq.row]))
            generated = int(self._rows.num_tokens[seq.row]) - seq.num_prompt_tokens
            self._waiting.count_ended(seq, generated)
            if reason != "error":
                self._saved.save_row(seq)
            self._empty_row(seq)
            self._finished.append(seq)
        seq.status, seq.finish_reason = SequenceStatus.FINISHED, reason

    def end(self, seq: Sequence, stop_token: int | None) -> None:
        """End a sequence after its last token; ``stop_token``: the token, if it is a stop token."""
        seq.stop_token = stop_token
        self.finish(seq, "length" if stop_token is None else "stop")

    def finish_pool_exhausted(self, seq: Sequence) -> None:
        """End a sequence that the whole pool cannot hold any longer."""
        self.finish(seq, "length")
        self._exhausted.append(seq)

    def take_exhausted(self) -> list[Sequence]:
        """Sequences that have exhausted the pool since the last call."""
        exhausted, self._exhausted = self._exhausted, []
        return exhausted

    def drop_finished(self) -> None:
        """Free the rows of sequences that have ended."""
        for seq in self._finished:
            self._rows.drop(seq)
        self._finished.clear()

    def preempt(self) -> None:
        """Preempt a sequence, or end it if it is the only one."""
        rows, n, seq = self._rows, self._rows.num_rows, self._victim()
        if n == 1 and rows.num_unknown[seq.row]:
            rows.num_decoding = 0  # skip it in this step: its unknown token may be its last
            return
        if n == 1:
            self.finish_pool_exhausted(seq)
            self.drop_finished()
            return
        self._send_back(seq)

    def make_way(self, first: Sequence) -> None:
        """Preempt a sequence for ``first``, which is next, if another client crowds its client out.

        A client loses a row only if its share is still the larger one then, so ``first`` stays
        next, and none of a higher priority. Without this, others would wait until sequences of a
        client that holds nearly all rows or blocks end.
        """
        share, held = self._waiting.share, self._waiting.num_rows
        fair = share(held(first.client))
        # Nobody is looked at one by one if even a client that held all rows would not crowd.
        if not self._rows.num_rows or share(self._rows.num_rows - 1) <= fair:
            return
        seq = self._victim()
        if share(held(seq.client) - 1) > fair and seq.priority >= first.priority:
            self._send_back(seq)

    def _victim(self) -> Sequence:
        """The running sequence to preempt next; the oldest of all is the last."""
        held = self._waiting.num_rows
        return max(self._rows.live(), key=lambda seq: (seq.priority, held(seq.client), seq.arrival))

    def _send_back(self, seq: Sequence) -> None:
        """Send a sequence back to the queue, with what it holds in host memory if that pays."""
        leaves = self._rows.compactions[seq.row] and all(
            group.can_leave(seq.row) for group in self._blocks.groups
        )
        if leaves and self._saved.park(seq):
            self.totals.swaps_total += 1
        seq.replay_until = max(seq.replay_until, int(self._rows.num_computed[seq.row]))
        seq.awaits_token = bool(self._rows.num_unknown[seq.row])
        self._empty_row(seq)
        self._rows.drop(seq)
        seq.status = SequenceStatus.WAITING
        self._waiting.put_back(seq)
        self.totals.preemptions_total += 1

    def _empty_row(self, seq: Sequence) -> None:
        """Write a row's tokens and counts to its sequence and free its blocks."""
        self._rows.save(seq)
        # A step in flight may still read these blocks; whoever gets them writes in a later one.
        self._blocks.release_row(seq.row)
        self._rows.next_event[seq.row], self._rows.caught_up[seq.row] = NO_EVENT, 0
