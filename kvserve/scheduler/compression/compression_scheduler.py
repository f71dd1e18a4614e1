"""Which events run in which step: their order, and how many a step has room for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.compression.candidates import (
    EventCandidates,
    OpenEvent,
    OpenEvents,
    ScheduledEvents,
    some_of,
)
from kvserve.scheduler.compression.handlers import HANDLERS, HostPrunedEvents, TakenBlocks
from kvserve.scheduler.messages.event import EventKind
from kvserve.scheduler.messages.output import (
    NO_TURNS,
    BegunTurns,
    CompactionTask,
    ObservationTask,
)
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.periodic import EngineWide
from kvserve.scheduler.triggers.trigger import Trigger


class CompressionScheduler:
    """Schedules the events of all rows.

    The events of a step observe at most ``max_observed`` queries together; only the first one may
    exceed that. Events that evict most go first, the oldest on ties. Lengths and blocks are exact
    as soon as an event is scheduled. A sequence whose event has to wait is skipped in this step.
    The handler of an event's kind decides what it does to blocks and lengths (``HANDLERS``).
    """

    def __init__(self, rows: RowTable, blocks: BlockManager, max_observed: int) -> None:
        self.rows = rows
        self.blocks = blocks
        self.open = OpenEvents()
        self.compactions = 0
        self.early_compactions = 0
        self.blocks_released = 0
        self.tokens_evicted = 0
        self._max_observed = max_observed
        self._engine_wide = EngineWideDates(rows)
        self._triggers: dict[int, Trigger] = {}
        self._kinds: dict[int, EventKind] = {}
        self._handlers = {kind: handler(blocks) for kind, handler in HANDLERS.items()}
        self._blocked: tuple[int, int] | None = None
        """Rank of the first sequence whose due event found no blocks. Cleared when its event, or
        that of a sequence before it, is scheduled."""

    def register(self, seq: Sequence) -> None:
        """Register the trigger of a sequence's policy, and the kind of its events."""
        self._triggers[seq.policy_id] = seq.trigger
        self._kinds[seq.policy_id] = seq.event_kind
        self._engine_wide.register(seq.policy_id, seq.trigger)

    @property
    def blocked_on_blocks(self) -> bool:
        """Whether a due event lacks blocks. They are kept for it: rows that are admitted would
        take what comes free, and be preempted for it, again and again."""
        return self._blocked is not None

    # ---- due ---------------------------------------------------------------------------------

    def compact_due(self) -> ScheduledEvents:
        """Schedule events that are due."""
        self._engine_wide.make_due()
        waiting = self._waiting()
        if not len(waiting):  # most steps
            self._blocked = None
            if self.open:
                self.open.close_scored()
            return ScheduledEvents()
        turning = waiting[self.rows.turn[waiting] < self.rows.num_turns[waiting]]
        turns = self._begin_turns(turning) if len(turning) else NO_TURNS
        if len(turns.rows):
            waiting = self._waiting()
        if not any(self._rank(row) == self._blocked for row in waiting):
            self._blocked = None  # that sequence was preempted, or has ended
        candidates = self._candidates(self._due(waiting))
        self.open.close_scored()  # what cannot be scheduled now is scored again
        return replace(self._schedule(candidates, self._max_observed), turns=turns)

    def compact_early(self, missing: int) -> tuple[CompactionTask, ...]:
        """Schedule events before they are due, or beyond ``max_observed``, to free blocks.

        Stops once ``missing`` blocks come free.
        """
        rows = self.rows
        at = rows.decoding_next()
        willing = [
            part[trigger.can_compress_early(rows.state(part))]
            for policy_id, trigger in self._triggers.items()
            if trigger.optional_period and len(part := at[rows.policy_id[at] == policy_id])
        ]
        at = np.concatenate([self._due(self._waiting()), *willing])
        candidates = [events for events in self._candidates(at) if events.known]
        freed = np.concatenate([np.zeros(0, int), *(events.blocks_freed for events in candidates)])
        order = (-freed).argsort(kind="stable")
        enough = int(np.searchsorted(freed[order].cumsum(), missing))
        wanted = np.zeros(len(freed), bool)
        wanted[order[: enough + 1]] = freed[order[: enough + 1]] > 0
        before = self.compactions
        scheduled = self._schedule(list(some_of(candidates, wanted)), None)
        self.early_compactions += self.compactions - before
        return tuple(replace(task, early=True) for task in scheduled.compactions)

    def prune(self, row: int) -> CompactionTask:
        """Schedule the event of a row whose prompt is computed and pruned in this step."""
        at, num_prompt = np.array([row], np.int32), int(self.rows.num_prompt[row])
        handler = self._handlers[EventKind.PRUNED]
        assert isinstance(handler, HostPrunedEvents)
        event = handler.in_prompt(self._due_events(int(self.rows.policy_id[row]), at), num_prompt)
        taken = handler.take_blocks(event)
        assert taken is not None
        task = self._scheduled(event, taken)
        return replace(task, token_ids=self.rows.token_ids[at, :num_prompt])

    def _waiting(self) -> IntArray:
        """Rows that have an event before their next token."""
        rows, n = self.rows, self.rows.num_rows
        waits = rows.num_computed[:n] >= rows.next_event[:n]
        waits &= rows.num_tokens[:n] < rows.max_len[:n]  # the others have had their last token
        at: IntArray = np.flatnonzero(waits).astype(np.int32)
        return at

    def _due(self, at: IntArray) -> IntArray:
        """Those of the rows ``at`` that do not wait for scores."""
        if not self.open.scoring:
            return at
        return at[[not self.open.is_scoring(self.rows.owner(row).seq_id) for row in at]]

    def _candidates(self, at: IntArray) -> list[EventCandidates]:
        """What events of rows ``at`` would do now, policy by policy."""
        candidates = []
        for policy_id in np.unique(self.rows.policy_id[at]).tolist():
            due = self._due_events(policy_id, at[self.rows.policy_id[at] == policy_id])
            candidates += self._handlers[due.kind].outcomes(due, self._scored)
        return candidates

    def _scored(self, due: EventCandidates) -> list[OpenEvent | None]:
        """For each of the ``due`` events, the event with its scores, or ``None`` without them."""
        starts = zip(due.at.tolist(), due.plan.query_start.tolist(), strict=True)
        return [self.open.scored(self.rows.owner(row).seq_id, start) for row, start in starts]

    def _due_events(self, policy_id: int, at: IntArray) -> EventCandidates:
        """Events of one policy's rows, before it is known how much they leave."""
        trigger, state = self._triggers[policy_id], self.rows.state(at)
        plan, old = trigger.plan(state), self.blocks.kv_lens[:, at]
        if not plan.is_within(state.kv_len).all():
            raise ValueError("an event would take entries that are not there")
        kind, layout = self._kinds[policy_id], self.blocks.layout
        return EventCandidates(policy_id, kind, trigger, at, plan, old, old, layout)

    # ---- scoring -----------------------------------------------------------------------------

    def _observation(self, events: EventCandidates) -> ObservationTask:
        """What the runner has to know about events to score them."""
        owners = np.array([self.rows.owner(row).seq_id for row in events.at])
        tokens = None
        if not events.trigger.logs:
            tokens = self.rows.tokens_from(events.at, events.plan.query_start)
        return ObservationTask(
            events.policy_id, events.at, owners, events.plan, events.old, tokens, kind=events.kind
        )

    # ---- scheduled ---------------------------------------------------------------------------

    def _schedule(
        self, candidates: list[EventCandidates], max_observed: int | None
    ) -> ScheduledEvents:
        """Schedule the events that fit a step and find their blocks; a task for each policy."""
        compactions: list[CompactionTask] = []
        observations: list[ObservationTask] = []
        if not any(len(events.at) for events in candidates):
            return ScheduledEvents()
        order = self._order(candidates)
        fits = np.ones(len(order), bool)
        if max_observed is not None:
            queries = np.concatenate([events.num_scored_queries for events in candidates])
            fits[order[1:]] = queries[order].cumsum()[1:] <= max_observed
        for events in some_of(candidates, fits):
            best = events.part(self._order([events]))
            if not best.known:
                observations.append(self._observation(best))
                self.open.start_scoring(observations[-1])
                continue
            taken = self._handlers[best.kind].take_blocks(best)  # of as many, in order, as find any
            row, first = best.at[0], self._rank(best.at[0])
            if taken is not None:
                if self._blocked is not None and first <= self._blocked:
                    self._blocked = None
                compactions.append(self._scheduled(best, taken))
            elif self.rows.num_computed[row] >= self.rows.next_event[row]:  # not an early one
                self._blocked = min(first, self._blocked or first)
        if not (compactions or observations or fits.all()):
            # The first events find no blocks; the others must not wait for them.
            return self._schedule(list(some_of(candidates, ~fits)), max_observed)
        return ScheduledEvents(tuple(compactions), tuple(observations))

    def _order(self, candidates: list[EventCandidates]) -> IntArray:
        """Indices of the events of all ``candidates``, in the order of scheduling."""
        ranks = [self._handlers[events.kind].rank(events) for events in candidates]
        at = np.concatenate([events.at for events in candidates])
        return np.lexsort((self.rows.arrival[at], self.rows.priority[at], -np.concatenate(ranks)))

    def _rank(self, row: int) -> tuple[int, int]:
        """A row's priority and arrival; the row with the highest rank is preempted first."""
        return int(self.rows.priority[row]), int(self.rows.arrival[row])

    def _scheduled(self, events: EventCandidates, taken: TakenBlocks) -> CompactionTask:
        """Make a task of events that have their blocks, and update their rows' counters."""
        done = events.part(slice(len(taken.released)))
        rows, blocks, at, new = self.rows, self.blocks, done.at, done.new
        asked = self._observation(done)
        rows.num_unmodified_tokens[at] = np.minimum(
            rows.num_unmodified_tokens[at], done.plan.region_start
        )
        rows.first_uncompressed_pos[at] = done.plan.first_uncompressed_pos
        for row, position in zip(at.tolist(), rows.num_computed[at].tolist(), strict=True):
            recorded = rows.owner(row).events
            if len(recorded) == rows.num_events[row]:
                recorded.append(position)
        rows.num_events[at] += 1
        log_from = self.schedule_next_event(done.policy_id, at)
        rows.blocks_released[at] += taken.released
        self.blocks_released += int(taken.released.sum())
        self.tokens_evicted += int((done.old - new).sum()) // blocks.layout.groups
        dst_blocks = blocks.written(at, taken.copy_start, new)
        task = CompactionTask.of(asked, new, taken.copy_start, dst_blocks, log_from, taken.codes)
        rows.compactions[at] += task.compacts
        rounded = at[task.rounds]
        rows.rounded_at[rounded] = rows.num_computed[rounded]
        self.compactions += int(np.count_nonzero(task.compacts))
        return task

    def schedule_next_event(self, policy_id: int, at: IntArray) -> IntArray:
        """Work out when rows ``at`` are due next; return from where they log queries."""
        rows, trigger = self.rows, self._triggers[policy_id]
        handler = self._handlers[self._kinds[policy_id]]
        turns = rows.turn[at] < rows.num_turns[at]
        for row in at[turns]:
            self._begin_turn(row, trigger)
        state = rows.state(at)
        next_event = handler.next_event(at, state, trigger.next_event(state))
        for i in np.flatnonzero((rows.num_computed[at] < rows.replay_until[at]) | turns):
            known = rows.num_computed[at[i]], next_event[i], rows.num_events[at[i]]
            next_event[i] = rows.owner(at[i]).next_event(*map(int, known))
        log_from = trigger.log_from(state, next_event)
        for i in np.flatnonzero(turns):
            stop = rows.owner(at[i]).next_stop(int(next_event[i]), int(rows.turn[at[i]]))
            next_event[i] = stop
        rows.next_event[at] = next_event
        self.blocks.queries.log_from(at, log_from)
        return log_from

    # ---- turns -------------------------------------------------------------------------------

    def _begin_turns(self, at: IntArray) -> BegunTurns:
        """Begin the next turn of recomputed rows that have reached its start. A row that had an
        event at that position has the event first."""
        begun, log_from = [], []
        for row in at.tolist():
            seq, computed = self.rows.owner(row), int(self.rows.num_computed[row])
            turn = seq.turns[self.rows.turn[row]]
            if turn.start == computed and computed not in seq.events:
                begun.append(row)
                log_from.append(self.schedule_next_event(seq.policy_id, np.array([row]))[0])
        return BegunTurns(np.array(begun, np.int32), np.array(log_from, np.int32))

    def _begin_turn(self, row: int, trigger: Trigger) -> None:
        """Begin a row's next turn if the row has reached it, as its trigger says."""
        rows, turn = self.rows, self.rows.owner(row).turns[self.rows.turn[row]]
        if turn.start == rows.num_computed[row]:
            at = np.array([row], np.int32)
            known = trigger.next_turn(rows.state(at), np.array([turn.end], np.int32))
            rows.num_prompt[at], rows.first_uncompressed_pos[at] = known
            rows.turn[row] += 1


class EngineWideDates:
    """Steps since the last event, for each policy with an ``EngineWide`` trigger."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._triggers: dict[int, EngineWide] = {}
        self._steps_since: dict[int, int] = {}

    def register(self, policy_id: int, trigger: Trigger) -> None:
        """Register the trigger of a policy; a new trigger starts to count steps."""
        if self._triggers.get(policy_id) == trigger:
            return
        self._triggers.pop(policy_id, None)
        if isinstance(trigger, EngineWide):
            self._triggers[policy_id], self._steps_since[policy_id] = trigger, 0

    def make_due(self) -> None:
        """Count this step; if a policy's period is over, make its oldest eligible rows due."""
        rows = self._rows
        for policy_id, trigger in self._triggers.items():
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
