"""When rows have events: which are due in a step, and when they are due next."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

import numpy as np

from kvserve.late import Late, Made
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.trigger import EventKind, Trigger
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.compression.step_events import StepEvents
    from kvserve.scheduler.messages.event import Events
    from kvserve.scheduler.triggers.periodic import EngineWide

_step_events = Late("scheduler.compression.step_events:StepEvents")


class CompressionScheduler:
    """Finds the events that are due; ``of_steps`` schedules them, which nobody needs before the
    first. A sequence whose event has to wait is skipped in this step."""

    def __init__(
        self, rows: RowTable, blocks: BlockManager, max_observed: int, totals: EngineStats
    ) -> None:
        """The events of a step observe at most ``max_observed`` queries together."""
        self.rows = rows
        self.blocks = blocks
        self._triggers: dict[int, Trigger] = {}
        self._kinds: dict[int, EventKind] = {}
        self._steps_since: dict[int, int] = {}
        """Steps since the last event, of each policy with an ``EngineWide`` trigger."""
        of_policies = self._triggers, self._kinds, self.schedule_next_event
        self.of_steps: Made[StepEvents] = Made(
            lambda: _step_events(rows, blocks, *of_policies, max_observed, totals)
        )

    def register(self, seq: Sequence) -> None:
        """Register the trigger of a sequence's policy, and the kind of its events."""
        policy_id, trigger = seq.policy_id, seq.trigger
        if self._triggers.get(policy_id) != trigger:
            self._steps_since.pop(policy_id, None)
            if trigger.counts_steps:
                self._steps_since[policy_id] = 0
        self._triggers[policy_id], self._kinds[policy_id] = trigger, seq.event_kind

    @property
    def scoring(self) -> Collection[int]:
        """Sequences whose events wait for their scores."""
        return () if self.of_steps.made is None else self.of_steps.made.scoring

    @property
    def blocked_on_blocks(self) -> bool:
        """Whether a due event lacks blocks. They are kept for it: rows that are admitted would
        take what comes free, and be preempted for it, again and again."""
        return self.of_steps.made is not None and self.of_steps.made.blocked is not None

    def take_scores(self, events: Events, kept: IntArray) -> None:
        """A step has come back with the scores of ``events``: ``kept [LG, E, R, ...]``."""
        self.of_steps().take_scores(events, kept)

    def compact_due(self) -> ScheduledEvents:
        """Schedule events that are due."""
        if self._steps_since:
            self._make_due()
        waiting = self._waiting()
        if len(waiting):
            return self.of_steps().schedule_due(waiting)
        if self.of_steps.made is not None:
            self.of_steps.made.forget()
        return ScheduledEvents()  # most steps

    def compact_early(self, missing: int) -> tuple[Events, ...]:
        """Schedule events before they are due, or beyond ``max_observed``, to free blocks.

        Stops once ``missing`` blocks come free.
        """
        rows, at = self.rows, self.rows.decoding_next()
        willing = [
            part[trigger.can_compress_early(rows.state(part))]
            for policy_id, trigger in self._triggers.items()
            if len(part := at[rows.policy_id[at] == policy_id])
        ]
        at = np.concatenate([self._waiting(), *willing])
        return self.of_steps().schedule_early(at, missing) if len(at) else ()

    def prune(self, row: int) -> Events:
        """Schedule the event of a row whose prompt is computed and pruned in this step."""
        return self.of_steps().prune(row)

    def schedule_next_event(self, policy_id: int, at: IntArray) -> IntArray:
        """Work out when rows ``at`` are due next; return from where they log queries."""
        rows, trigger, kind = self.rows, self._triggers[policy_id], self._kinds[policy_id]
        state = rows.state(at)
        next_event = trigger.next_event(state)
        if kind is not EventKind.EVEN:
            next_event = self.of_steps().handler(kind).next_event(at, state, next_event)
        for i in np.flatnonzero(rows.num_computed[at] < rows.replay_until[at]):
            known = rows.num_computed[at[i]], next_event[i], rows.num_events[at[i]]
            next_event[i] = rows.owner(at[i]).next_event(*map(int, known))
        log_from = trigger.log_from(state, next_event)
        rows.next_event[at] = next_event
        self.blocks.queries.log_from(at, log_from, trigger.log_stride)
        return log_from

    def _make_due(self) -> None:
        """Count this step; if an engine-wide period is over, make its oldest eligible rows due."""
        rows = self.rows
        for policy_id in self._steps_since:
            trigger = cast("EngineWide", self._triggers[policy_id])
            at = np.flatnonzero(rows.policy_id[: rows.num_decoding] == policy_id)
            if not len(at):
                continue
            self._steps_since[policy_id] += 1
            if self._steps_since[policy_id] % trigger.period:
                continue
            at = at[trigger.eligible(rows.state(at))]
            at = at[rows.arrival[at].argsort()][: trigger.most]
            rows.next_event[at] = rows.num_computed[at]
            if len(at):
                self._steps_since[policy_id] = 0

    def _waiting(self) -> IntArray:
        """Rows that have an event before their next token."""
        rows, n = self.rows, self.rows.num_rows
        waits = rows.num_computed[:n] >= rows.next_event[:n]
        waits &= rows.num_tokens[:n] < rows.max_len[:n]  # the others have had their last token
        at: IntArray = np.flatnonzero(waits).astype(np.int32)
        return at
