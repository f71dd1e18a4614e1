"""A step's events: their order, how many it has room for, and the blocks that they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.compression.kinds import KINDS
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.trigger import EventKind, Trigger
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.compression.handlers import HostEvenEvents
    from kvserve.scheduler.triggers.pruning import Pruned


class StepEvents:
    """Schedules the events of rows that wait for one.

    The events of a step observe at most ``max_observed`` queries together; only the first one may
    exceed that. Events that evict most go first, the oldest on ties. Lengths and blocks are exact
    as soon as an event is scheduled. The handler of an event's kind decides what it does to blocks
    and lengths (``KINDS``).
    """

    def __init__(
        self,
        rows: RowTable,
        blocks: BlockManager,
        triggers: Mapping[int, Trigger],
        kinds: Mapping[int, EventKind],
        schedule_next: Callable[[int, IntArray], IntArray],
        max_observed: int,
        totals: EngineStats,
    ) -> None:
        """``triggers`` and ``kinds`` are by policy; ``schedule_next`` works out when rows of one
        are due next, and returns from where they log queries."""
        self.rows = rows
        self.blocks = blocks
        self._triggers, self._kinds, self._schedule_next = triggers, kinds, schedule_next
        self._max_observed, self._totals = max_observed, totals
        self.scoring: set[int] = set()
        """Sequences whose events wait for their scores."""
        self._answers: dict[tuple[int, int], IntArray] = {}
        """The device's, ``[LG, R, ...]``, by sequence and the position of the event's first query:
        a sequence that was preempted in the step that scored its event may be due for another."""
        self._handlers: dict[EventKind, HostEvenEvents] = {}
        self.blocked: tuple[int, int] | None = None
        """Rank of the first sequence whose due event found no blocks. Cleared when its event, or
        that of a sequence before it, is scheduled."""

    def handler(self, kind: EventKind) -> HostEvenEvents:
        """What a kind of events does on the host."""
        if kind not in self._handlers:
            self._handlers[kind] = KINDS[kind].host(self.blocks)
        return self._handlers[kind]

    def take_scores(self, events: Events, kept: IntArray) -> None:
        """A step has come back with the scores of ``events``: ``kept [LG, E, R, ...]``."""
        for e, (seq_id, query_start) in enumerate(_ids_and_starts(events)):
            self.scoring.remove(seq_id)
            self._answers[seq_id, query_start] = kept[:, e]

    def forget(self) -> None:
        """No row waits for an event."""
        self.blocked = None
        self._answers.clear()

    def schedule_due(self, waiting: IntArray) -> ScheduledEvents:
        """Schedule events of the rows ``waiting``."""
        if self.blocked is not None and self.blocked not in map(self._rank, waiting):
            self.blocked = None  # that sequence was preempted, or has ended
        candidates = self._candidates(waiting)
        self._answers.clear()  # what cannot be scheduled now is scored again
        return self._schedule(candidates, self._max_observed)

    def schedule_early(self, at: IntArray, missing: int) -> tuple[Events, ...]:
        """Schedule events of rows ``at`` until ``missing`` blocks come free."""
        size = self.blocks.layout.block_size
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
        taken = self.handler(EventKind.PRUNED).take_blocks(replace(due, new_lens=new.copy()))
        assert taken is not None
        token_ids = self.rows.token_ids[due.rows, :num_prompt]
        return replace(self._scheduled(taken), token_ids=token_ids)

    def _candidates(self, at: IntArray) -> list[Events]:
        """What events of rows ``at`` would do now, policy by policy; none of those being scored."""
        rows = self.rows
        if self.scoring:
            at = at[[rows.owner(row).seq_id not in self.scoring for row in at]]
        candidates = []
        for policy_id in np.unique(rows.policy_id[at]).tolist():
            due = self._due_events(policy_id, at[rows.policy_id[at] == policy_id])
            scored = [self._answers.get(each) for each in _ids_and_starts(due)]
            candidates += self.handler(due.kind).outcomes(due, self._triggers[policy_id], scored)
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

    def _schedule(self, candidates: list[Events], max_observed: int | None) -> ScheduledEvents:
        """Schedule the events that fit a step and find their blocks, policy by policy."""
        compactions: list[Events] = []
        observations: list[Events] = []
        if not any(len(events.rows) for events in candidates):
            return ScheduledEvents()
        ranks = [self.handler(events.kind).rank(events) for events in candidates]
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
            taken = self.handler(best.kind).take_blocks(best)  # of as many, in order, as find any
            row = best.rows[0]
            if taken is not None:
                if self.blocked is not None and self._rank(row) <= self.blocked:
                    self.blocked = None
                compactions.append(self._scheduled(taken))
            elif self.rows.num_computed[row] >= self.rows.next_event[row]:  # not an early one
                self.blocked = min(self._rank(row), self.blocked or self._rank(row))
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
        log_from = self._schedule_next(events.policy_id, at)
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
            whole = np.array_equal(own, np.arange(len(events.rows)))
            yield events if whole else events.part(own)
        first += len(events.rows)
