"""Which events run in which step: their order, and how many a step has room for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.compression.kinds import KINDS
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.trigger import EventKind, Trigger
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.compression.handlers import HostEvenEvents
    from kvserve.scheduler.triggers.periodic import EngineWide
    from kvserve.scheduler.triggers.pruning import Pruned


class CompressionScheduler:
    """Schedules the events of all rows.

    The events of a step observe at most ``max_observed`` queries together; only the first one may
    exceed that. Events that evict most go first, the oldest on ties. Lengths and blocks are exact
    as soon as an event is scheduled. A sequence whose event has to wait is skipped in this step.
    The handler of an event's kind decides what it does to blocks and lengths (``KINDS``).
    """

    def __init__(
        self, rows: RowTable, blocks: BlockManager, max_observed: int, totals: EngineStats
    ) -> None:
        self.rows = rows
        self.blocks = blocks
        self._totals = totals
        self.scoring: set[int] = set()
        """Sequences whose events wait for their scores."""
        self._answers: dict[tuple[int, int], IntArray] = {}
        """The device's, ``[LG, R, ...]``, by sequence and the position of the event's first query:
        a sequence that was preempted in the step that scored its event may be due for another."""
        self._max_observed = max_observed
        self._triggers: dict[int, Trigger] = {}
        self._kinds: dict[int, EventKind] = {}
        self._steps_since: dict[int, int] = {}
        """Steps since the last event, of each policy with an ``EngineWide`` trigger."""
        self._handlers: dict[EventKind, HostEvenEvents] = {}
        self._blocked: tuple[int, int] | None = None
        """Rank of the first sequence whose due event found no blocks. Cleared when its event, or
        that of a sequence before it, is scheduled."""

    def register(self, seq: Sequence) -> None:
        """Register the trigger of a sequence's policy, and the kind of its events."""
        policy_id, trigger = seq.policy_id, seq.trigger
        if self._triggers.get(policy_id) != trigger:
            self._steps_since.pop(policy_id, None)
            if trigger.counts_steps:
                self._steps_since[policy_id] = 0
        self._triggers[policy_id], self._kinds[policy_id] = trigger, seq.event_kind
        if seq.event_kind not in self._handlers:
            self._handlers[seq.event_kind] = KINDS[seq.event_kind].host(self.blocks)

    @property
    def blocked_on_blocks(self) -> bool:
        """Whether a due event lacks blocks. They are kept for it: rows that are admitted would
        take what comes free, and be preempted for it, again and again."""
        return self._blocked is not None

    def take_scores(self, events: Events, kept: IntArray) -> None:
        """A step has come back with the scores of ``events``: ``kept [LG, E, R, ...]``."""
        for e, (seq_id, query_start) in enumerate(_ids_and_starts(events)):
            self.scoring.remove(seq_id)
            self._answers[seq_id, query_start] = kept[:, e]

    # ---- due ---------------------------------------------------------------------------------

    def compact_due(self) -> ScheduledEvents:
        """Schedule events that are due."""
        if self._steps_since:
            self._make_due()
        waiting = self._waiting()
        if not len(waiting):  # most steps
            self._blocked = None
            self._answers.clear()
            return ScheduledEvents()
        if self._blocked is not None and self._blocked not in map(self._rank, waiting):
            self._blocked = None  # that sequence was preempted, or has ended
        candidates = self._candidates(waiting)
        self._answers.clear()  # what cannot be scheduled now is scored again
        return self._schedule(candidates, self._max_observed)

    def compact_early(self, missing: int) -> tuple[Events, ...]:
        """Schedule events before they are due, or beyond ``max_observed``, to free blocks.

        Stops once ``missing`` blocks come free.
        """
        rows, size = self.rows, self.blocks.layout.block_size
        at = rows.decoding_next()
        willing = [
            part[trigger.can_compress_early(rows.state(part))]
            for policy_id, trigger in self._triggers.items()
            if len(part := at[rows.policy_id[at] == policy_id])
        ]
        at = np.concatenate([self._waiting(), *willing])
        candidates = [events for events in self._candidates(at) if events.lengths_known]
        columns = [
            -(-events.old_lens // size) - -(-events.new_lens // size) for events in candidates
        ]
        freed = np.concatenate([np.zeros(0, int), *(each.sum(axis=(0, 2)) for each in columns)])
        order = (-freed).argsort(kind="stable")
        enough = int(np.searchsorted(freed[order].cumsum(), missing))
        chosen = order[: enough + 1]
        chosen = chosen[freed[chosen] > 0]
        before = self._totals.compactions_total
        scheduled = self._schedule(list(_some_of(candidates, chosen)), None)
        self._totals.early_compactions_total += self._totals.compactions_total - before
        return tuple(replace(events, early=True) for events in scheduled.compactions)

    def prune(self, row: int) -> Events:
        """Schedule the event of a row whose prompt is computed and pruned in this step."""
        num_prompt, policy_id = int(self.rows.num_prompt[row]), int(self.rows.policy_id[row])
        due = self._due_events(policy_id, np.array([row], np.int32))
        trigger = cast("Pruned", self._triggers[policy_id])
        by_layer = trigger.prompt_lengths(num_prompt, self.blocks.layout.num_layers)
        new = np.broadcast_to(np.array(by_layer, np.int32)[:, None, None], due.old_lens.shape)
        taken = self._handlers[EventKind.PRUNED].take_blocks(replace(due, new_lens=new.copy()))
        assert taken is not None
        token_ids = self.rows.token_ids[due.rows, :num_prompt]
        return replace(self._scheduled(taken), token_ids=token_ids)

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

    def _candidates(self, at: IntArray) -> list[Events]:
        """What events of rows ``at`` would do now, policy by policy; none of those being scored."""
        rows = self.rows
        if self.scoring:
            at = at[[rows.owner(row).seq_id not in self.scoring for row in at]]
        candidates = []
        for policy_id in np.unique(rows.policy_id[at]).tolist():
            due = self._due_events(policy_id, at[rows.policy_id[at] == policy_id])
            scored = [self._answers.get(each) for each in _ids_and_starts(due)]
            candidates += self._handlers[due.kind].outcomes(due, self._triggers[policy_id], scored)
        return candidates

    def _due_events(self, policy_id: int, at: IntArray) -> Events:
        """Events of one policy's rows, before it is known how much they leave."""
        rows, trigger = self.rows, self._triggers[policy_id]
        state = rows.state(at)
        plan = trigger.plan(state)
        if not plan.is_within(state.kv_len).all():
            raise ValueError("an event would take entries that are not there")
        kind, owners = self._kinds[policy_id], np.array([rows.owner(row).seq_id for row in at])
        token_ids = None if trigger.logs else rows.tokens_from(at, plan.query_start)
        return Events(policy_id, kind, at, owners, plan, self.blocks.kv_lens[:, at], token_ids)

    # ---- scheduled ---------------------------------------------------------------------------

    def _schedule(self, candidates: list[Events], max_observed: int | None) -> ScheduledEvents:
        """Schedule the events that fit a step and find their blocks, policy by policy."""
        compactions: list[Events] = []
        observations: list[Events] = []
        if not any(len(events.rows) for events in candidates):
            return ScheduledEvents()
        ranks = [self._handlers[events.kind].rank(events) for events in candidates]
        at = np.concatenate([events.rows for events in candidates])
        order = np.lexsort((self.rows.arrival[at], self.rows.priority[at], -np.concatenate(ranks)))
        later = order[:0]
        if max_observed is not None:
            queries = [  # whose attention each event still has to work out
                events.plan.num_scored_queries * (not events.lengths_known or events.kind.is_even)
                for events in candidates
            ]
            fits = np.concatenate(queries)[order].cumsum() <= max_observed
            fits[0] = True
            order, later = order[fits], order[~fits]
        for best in _some_of(candidates, order):
            if not best.lengths_known:
                observations.append(best)
                assert self.scoring.isdisjoint(best.seq_ids.tolist())
                self.scoring.update(best.seq_ids.tolist())
                continue
            taken = self._handlers[best.kind].take_blocks(best)  # of as many, in order, as find any
            row = best.rows[0]
            if taken is not None:
                if self._blocked is not None and self._rank(row) <= self._blocked:
                    self._blocked = None
                compactions.append(self._scheduled(taken))
            elif self.rows.num_computed[row] >= self.rows.next_event[row]:  # not an early one
                self._blocked = min(self._rank(row), self._blocked or self._rank(row))
        if not (compactions or observations) and len(later):
            # The first events find no blocks; the others must not wait for them.
            return self._schedule(list(_some_of(candidates, np.sort(later))), max_observed)
        return ScheduledEvents(tuple(compactions), tuple(observations))

    def _rank(self, row: int) -> tuple[int, int]:
        """A row's priority and arrival; the row with the highest rank is preempted first."""
        return int(self.rows.priority[row]), int(self.rows.arrival[row])

    def _scheduled(self, events: Events) -> Events:
        """Update the counters of rows whose ``events`` have their blocks, and date the next ones;
        the events as the runner needs them."""
        rows, kv, at, new = self.rows, self.blocks.kv, events.rows, events.new_lens
        unmodified = rows.num_unmodified_tokens
        # Columns behind are never published, so no cached column depends on an event.
        unmodified[at] = np.minimum(unmodified[at], events.plan.region_start)
        rows.first_uncompressed_pos[at] = events.plan.first_uncompressed_pos
        for row, position in zip(at.tolist(), rows.num_computed[at].tolist(), strict=True):
            recorded = rows.owner(row).events
            if len(recorded) == rows.num_events[row]:
                recorded.append(position)
        rows.num_events[at] += 1
        log_from = self.schedule_next_event(events.policy_id, at)
        rows.blocks_released[at] += events.released
        self._totals.blocks_released_total += int(events.released.sum())
        evicted = int(events.dropped.sum()) // self.blocks.layout.groups
        self._totals.tokens_evicted_total += evicted
        # The columns of the entries [copy_start, new), padded.
        first = events.copy_start // self.blocks.layout.block_size
        width = int((-(-new.max(axis=(0, 2)) // self.blocks.layout.block_size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), kv.blocks.shape[3] - 1)
        # Advanced axes come first: [E, width, LG, R] -> [LG, E, R, width].
        dst_blocks = kv.blocks[:, at[:, None], :, columns].transpose(2, 0, 3, 1)
        compacts, rounded = events.compacts, at[events.rounds]
        rows.compactions[at] += compacts
        rounded_at = rows.num_computed[at] - self._triggers[events.policy_id].intact
        rows.rounded_at[rounded] = rounded_at[events.rounds]
        self._totals.compactions_total += int(np.count_nonzero(compacts))
        return replace(
            events,
            dst_blocks=dst_blocks,
            log_from=log_from,
            rounded_at=rounded_at,
            choices=events.choices[:0],
        )

    def schedule_next_event(self, policy_id: int, at: IntArray) -> IntArray:
        """Work out when rows ``at`` are due next; return from where they log queries."""
        rows, trigger = self.rows, self._triggers[policy_id]
        handler = self._handlers[self._kinds[policy_id]]
        state = rows.state(at)
        next_event = handler.next_event(at, state, trigger.next_event(state))
        for i in np.flatnonzero(rows.num_computed[at] < rows.replay_until[at]):
            known = rows.num_computed[at[i]], next_event[i], rows.num_events[at[i]]
            next_event[i] = rows.owner(at[i]).next_event(*map(int, known))
        log_from = trigger.log_from(state, next_event)
        rows.next_event[at] = next_event
        self.blocks.queries.log_from(at, log_from, trigger.log_stride)
        return log_from


def _ids_and_starts(events: Events) -> Iterator[tuple[int, int]]:
    """Ids of sequences, and the positions of their events' first queries."""
    return zip(events.seq_ids.tolist(), events.plan.query_start.tolist(), strict=True)


def _some_of(candidates: list[Events], at: IntArray) -> Iterator[Events]:
    """Those with the numbers ``at`` among the events of all ``candidates``, in this order; no empty
    groups."""
    first = 0
    for events in candidates:
        own = at[(at >= first) & (at < first + len(events.rows))] - first
        if len(own):
            yield events.part(own)
        first += len(events.rows)
