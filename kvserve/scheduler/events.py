"""Events: who is due, what it takes of lengths and blocks, and when the next one comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.code_trigger import CodeBook
from kvserve.scheduler.event_plans import Booked, EventPlans, chosen
from kvserve.scheduler.gate import BreakEvenGate
from kvserve.scheduler.output import CompactionTask, ObservationTask
from kvserve.scheduler.periodic import EngineWide
from kvserve.scheduler.pruning import Pruned
from kvserve.scheduler.rows import RowTable
from kvserve.scheduler.sequence import Sequence
from kvserve.scheduler.trigger import NO_EVENT, EventPlan, RowState, Trigger


class EventBook:
    """Books the events of all rows; lengths and blocks are exact as soon as one is booked.

    The events of a step observe at most ``max_observed`` queries, one event aside; those that free
    most go first, the oldest on ties. Who has to wait sits the step out. With a ``gate``, optional
    events that do not pay are left out until their next date.
    """

    def __init__(
        self,
        rows: RowTable,
        blocks: BlockManager,
        max_observed: int,
        gate: BreakEvenGate | None = None,
    ) -> None:
        self.rows = rows
        self.blocks = blocks
        self.compactions = 0
        self.early_compactions = 0
        self.skipped = 0
        self.blocks_released = 0
        self.tokens_evicted = 0
        self._starved: tuple[int, int] | None = None
        """The first (by priority, then arrival: the last to make way) whose codes found no blocks,
        until its event or that of one before it is booked.
        """
        self._max_observed = max_observed
        self.gate = gate
        self._triggers: dict[int, Trigger] = {}
        self._steps_since: dict[int, int] = {}
        self._uneven: set[int] = set()
        self._keeps_blocks: set[int] = set()
        self._observing: set[int] = set()
        """Sequences whose counts are on their way to the host."""
        self._counts: dict[tuple[int, int], IntArray] = {}
        """``[LG, R]`` entries that events just observed will keep, by sequence and first query.

        The query tells an event from an earlier one: a sequence may lose its cache, and begin
        anew, in the very step that observes it.
        """

    def register(self, seq: Sequence) -> None:
        """Know the trigger of a sequence's policy."""
        policy_id = seq.policy_id
        if self._triggers.get(policy_id) != seq.trigger:
            self._steps_since.pop(policy_id, None)
        self._triggers[policy_id] = seq.trigger
        for policies, belongs in (
            (self._uneven, seq.uneven),
            (self._keeps_blocks, seq.keeps_blocks),
        ):
            policies.discard(policy_id)
            if belongs:
                policies.add(policy_id)
        if isinstance(seq.trigger, EngineWide):
            self._steps_since.setdefault(policy_id, 0)

    def take_engine_wide(self) -> None:
        """Make rows due whose trigger counts the engine's steps."""
        rows = self.rows
        for policy_id in self._steps_since:
            trigger = self._triggers[policy_id]
            assert isinstance(trigger, EngineWide)
            at = np.flatnonzero(rows.policy_id[: rows.num_decoding] == policy_id)
            if not len(at):
                continue
            self._steps_since[policy_id] += 1
            if self._steps_since[policy_id] % trigger.period:
                continue
            at = at[trigger.eligible(self._row_state(at))]
            at = at[rows.arrival[at].argsort()][: trigger.most]
            rows.next_event[at] = rows.num_computed[at]
            if len(at):
                self._steps_since[policy_id] = 0

    def compact_due(self, entries_that_fit: int) -> Booked:
        """Book events that are due.

        ``entries_that_fit`` is what the pool holds, if requests wait for it, otherwise 0.
        """
        waiting = self._waiting()
        if not any(self._rank(row) == self._starved for row in waiting):
            self._starved = None  # it has made way itself, or ended
        plans = self._plans(self._due(waiting))
        self._counts.clear()  # what cannot be booked now is observed again
        if self.gate is not None:
            plans = self._that_pay(self.gate, plans, entries_that_fit)
        return self._book(plans, self._max_observed)

    def compact_early(self, missing: int) -> tuple[CompactionTask, ...]:
        """Book events ahead of their time or budget, until ``missing`` blocks come free."""
        rows = self.rows
        at = rows.decoding_next()
        willing = [
            part[trigger.willing(self._row_state(part))]
            for policy_id, trigger in self._triggers.items()
            if trigger.optional_period and len(part := at[rows.policy_id[at] == policy_id])
        ]
        plans = [
            p
            for p in self._plans(np.concatenate([self._due(self._waiting()), *willing]))
            if p.known
        ]
        freed = np.concatenate([np.zeros(0, int), *(plan.blocks_freed for plan in plans)])
        order = (-freed).argsort(kind="stable")
        enough = int(np.searchsorted(freed[order].cumsum(), missing))
        wanted = np.zeros(len(freed), bool)
        wanted[order[: enough + 1]] = freed[order[: enough + 1]] > 0
        before = self.compactions
        booked = self._book(chosen(plans, wanted), None)
        self.early_compactions += self.compactions - before
        return tuple(replace(task, early=True) for task in booked.compactions)

    def take_counts(self, tasks: tuple[ObservationTask, ...], counts: Iterable[IntArray]) -> None:
        """What observed events will leave, for each task.

        Counts ``[LG, E, R]``, or kept columns ``[LG, E, R, K]`` (-1 behind the last).
        """
        self.forget_observed(tasks)
        for task, found in zip(tasks, counts, strict=True):
            events = zip(task.seq_ids.tolist(), task.plan.query_start.tolist(), strict=True)
            self._counts |= zip(events, np.moveaxis(found, 1, 0), strict=True)

    def forget_observed(self, tasks: tuple[ObservationTask, ...]) -> None:
        """Wait no longer for what these have observed."""
        for task in tasks:
            self._observing.difference_update(task.seq_ids.tolist())

    @property
    def starving(self) -> bool:
        """Whether an event that writes codes finds no blocks: what comes free is for it."""
        return self._starved is not None

    @property
    def observing(self) -> bool:
        """Whether some row waits for counts that are on their way."""
        return bool(self._observing)

    def prune(self, row: int) -> CompactionTask:
        """Book the event of a row whose prompt is computed in this step, and pruned on the way."""
        rows, layout, at = self.rows, self.blocks.layout, np.array([row], np.int32)
        policy_id, num_prompt = int(rows.policy_id[row]), int(rows.num_prompt[row])
        trigger = self._triggers[policy_id]
        assert isinstance(trigger, Pruned)
        plan, old = self._plan(policy_id, at)
        lengths = np.array(trigger.prompt_lengths(num_prompt, layout.num_layers), np.int32)
        new = np.broadcast_to(lengths[:, None, None], old.shape).copy()
        task = self._compact(EventPlans(policy_id, at, plan, old, new, True, True, layout))
        return replace(task, token_ids=rows.token_ids[at, :num_prompt])

    def _waiting(self) -> IntArray:
        """Rows with an event to come before they go on."""
        rows, n = self.rows, self.rows.num_rows
        waits = rows.num_computed[:n] >= rows.next_event[:n]
        waits &= rows.num_tokens[:n] < rows.max_len[:n]  # the others have had their last token
        at: IntArray = np.flatnonzero(waits).astype(np.int32)
        return at

    def _due(self, at: IntArray) -> IntArray:
        """Those of the rows ``at`` whose counts are not on their way."""
        if not self._observing:
            return at
        return at[[self.rows.owner(row).seq_id not in self._observing for row in at]]

    def _plans(self, at: IntArray) -> list[EventPlans]:
        """What events of rows ``at`` would do now, policy by policy."""
        plans = []
        for policy_id in np.unique(self.rows.policy_id[at]).tolist():
            part = at[self.rows.policy_id[at] == policy_id]
            if policy_id in self._uneven:
                plans += self._uneven_plans(policy_id, part)
            else:
                plan, old = self._plan(policy_id, part)
                new = old - plan.evicted[None, :, None]
                plans.append(
                    EventPlans(policy_id, part, plan, old, new, False, True, self.blocks.layout)
                )
        return plans

    def _uneven_plans(self, policy_id: int, at: IntArray) -> list[EventPlans]:
        """Events that were observed in the step before, and those that have to be."""
        plan, old = self._plan(policy_id, at)
        owners = [self.rows.owner(row).seq_id for row in at]
        events = list(zip(owners, plan.query_start.tolist(), strict=True))
        known, new = np.array([event in self._counts for event in events]), old.copy()
        columns, trigger = None, self._triggers[policy_id]
        if isinstance(trigger, CodeBook):
            assert self.blocks.codes is not None
            columns = np.empty(len(events), object)
            for i in np.flatnonzero(known):
                afresh, found = bool(plan.window_len[i]), self._counts[events[i]]
                columns[i] = self.blocks.codes.plan(
                    int(at[i]), old[:, i], found, afresh, trigger.raw_fallback
                )
                new[:, i] = columns[i].kv_lens
        elif policy_id in self._keeps_blocks:
            columns = np.empty(len(events), object)
            for place, event in enumerate(events):
                columns[place] = self._counts.get(event)
            new[:, known] = plan.keep[known, None]
        else:
            for i in np.flatnonzero(known):
                new[:, i] = self._counts[events[i]] + plan.region_start[i]
        both = EventPlans(policy_id, at, plan, old, new, True, True, self.blocks.layout, columns)
        return [replace(both.part(known == done), known=done) for done in (True, False)]

    def _plan(self, policy_id: int, at: IntArray) -> tuple[EventPlan, IntArray]:
        plan = self._triggers[policy_id].plan(self._row_state(at))
        return plan, self.blocks.kv_lens[:, at]

    def _that_pay(
        self, gate: BreakEvenGate, plans: list[EventPlans], entries_that_fit: int
    ) -> list[EventPlans]:
        """Put off optional events that would not earn back what they cost."""
        rows, passed = self.rows, []
        for plan in plans:
            period = self._triggers[plan.policy_id].optional_period
            if not period:
                passed.append(plan)
                continue
            at = plan.at
            # Nobody knows how long a sequence goes on: take it for as long as it has gone.
            generated = rows.num_tokens[at] - rows.num_prompt[at]
            left = np.minimum(rows.max_len[at] - rows.num_tokens[at], generated)
            pays = gate.pays(plan.plan.evicted, plan.plan.observed, left, entries_that_fit)
            pays |= np.array([self._happened(row) for row in at], bool)
            rows.next_event[at[~pays]] += period
            self.skipped += int(np.count_nonzero(~pays))
            passed.append(plan.part(pays))
        return passed

    def _happened(self, row: int) -> bool:
        """Whether a row's next event is one that it had before it lost its cache."""
        recorded = self.rows.owner(row).events
        return bool(recorded) and recorded[-1] >= self.rows.num_computed[row]

    def _book(self, plans: list[EventPlans], max_observed: int | None) -> Booked:
        """Book the events that fit a step and find their blocks; a task for each policy."""
        compactions: list[CompactionTask] = []
        observations: list[ObservationTask] = []
        if not any(len(plan.at) for plan in plans):
            return Booked()
        freed = np.concatenate([self._freed(plan) for plan in plans])
        observed = np.concatenate([plan.observed for plan in plans])
        at = np.concatenate([plan.at for plan in plans])
        order = np.lexsort((self.rows.arrival[at], self.rows.priority[at], -freed))
        fits = np.ones(len(order), bool)
        if max_observed is not None:
            fits[order[1:]] = observed[order].cumsum()[1:] <= max_observed
        for plan in chosen(plans, fits):
            ranks = self.rows.arrival[plan.at], self.rows.priority[plan.at]
            best = plan.part(np.lexsort((*ranks, -self._freed(plan))))
            if not plan.known:
                observations.append(self._observation(best))
                self._observing.update(observations[-1].seq_ids.tolist())
                continue
            if isinstance(self._triggers[plan.policy_id], CodeBook):
                compactions += self._code(best)
                continue
            count = len(best.at)
            if best.columns is None:
                count = self.blocks.affordable(best.at, best.plan.region_start, best.new)
            if count:
                compactions.append(self._compact(best.part(slice(count))))
        if not (compactions or observations or fits.all()):
            # Those that went first find no blocks: they must not keep the others waiting.
            return self._book(chosen(plans, ~fits), max_observed)
        return Booked(tuple(compactions), tuple(observations))

    def _rank(self, row: int) -> tuple[int, int]:
        """Of two rows the higher one makes way."""
        return int(self.rows.priority[row]), int(self.rows.arrival[row])

    def _freed(self, plan: EventPlans) -> IntArray:
        """What events go by. Those that write codes evict little and come first, the oldest first:
        behind newer ones that evict, an old one might wait for ever.
        """
        if isinstance(self._triggers[plan.policy_id], CodeBook):
            return np.full(len(plan.at), NO_EVENT)
        return plan.plan.evicted

    def _observation(self, plan: EventPlans) -> ObservationTask:
        owners = np.array([self.rows.owner(row).seq_id for row in plan.at])
        trigger = self._triggers[plan.policy_id]
        tokens = None if trigger.logs else self.rows.tokens_from(plan.at, plan.plan.query_start)
        return ObservationTask(plan.policy_id, plan.at, owners, plan.plan, plan.old, tokens)

    def _code(self, plan: EventPlans) -> list[CompactionTask]:
        """Book, one after the other, as many events that write codes as there are blocks for."""
        assert plan.columns is not None
        released, codes = self.blocks.code(plan.at, plan.columns)
        first = self._rank(plan.at[0])
        if codes is None:
            self._starved = min(first, self._starved or first)
            return []
        if self._starved is not None and first <= self._starved:
            self._starved = None
        done = plan.part(slice(len(released)))
        return [replace(self._booked(done, np.zeros_like(done.at), released), codes=codes)]

    def _compact(self, plan: EventPlans) -> CompactionTask:
        """Book events; lengths and blocks are exact at once."""
        blocks, at, new = self.blocks, plan.at, plan.new
        if plan.columns is None:
            copy_start = blocks.make_private(at, plan.plan.region_start, new)
            released = blocks.truncate(at, new)
        else:
            copy_start = new.max(axis=(0, 2))  # nothing is copied
            kept = zip(at.tolist(), plan.columns, new.transpose(1, 0, 2), strict=True)
            released = np.array([blocks.keep_columns(*one) for one in kept], np.int32)
        return self._booked(plan, copy_start, released)

    def _booked(self, plan: EventPlans, copy_start: IntArray, released: IntArray) -> CompactionTask:
        """Events whose blocks are found, as a task; their rows' counters are those after it."""
        rows, blocks, size = self.rows, self.blocks, self.blocks.layout.block_size
        at, new = plan.at, plan.new
        observed = self._observation(plan)
        rows.num_identity[at] = np.minimum(rows.num_identity[at], plan.plan.region_start)
        rows.run_start[at] = plan.plan.run_start
        log_from = self.expect(plan.policy_id, at)
        rows.compactions[at] += 1
        for row, position in zip(at.tolist(), rows.num_computed[at].tolist(), strict=True):
            recorded = rows.owner(row).events
            if not recorded or position > recorded[-1]:
                recorded.append(position)
        rows.blocks_released[at] += released
        self.compactions += len(at)
        self.blocks_released += int(released.sum())
        self.tokens_evicted += int((plan.old - new).sum()) // blocks.layout.groups
        first = copy_start // size
        width = int((-(-new.max(axis=(0, 2)) // size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), blocks.kv.blocks.shape[3] - 1)
        # Advanced axes come first: [E, width, LG, R] -> [LG, E, R, width].
        dst_blocks = blocks.kv.blocks[:, at[:, None], :, columns].transpose(2, 0, 3, 1)
        return CompactionTask.of(observed, new, copy_start, dst_blocks, log_from)

    def expect(self, policy_id: int, at: IntArray) -> IntArray:
        """Work out when rows ``at`` are due next; returns from where they log queries."""
        rows = self.rows
        trigger, state = self._triggers[policy_id], self._row_state(at)
        next_event = trigger.next_event(state)
        if isinstance(trigger, CodeBook) and self.blocks.codes is not None:
            # What stayed raw at the prompt's end does so for good.
            raw = ~self.blocks.codes.coded[:, at].any(axis=(0, 2)) & (state.run_start > 0)
            next_event[raw] = NO_EVENT
        for i in np.flatnonzero(rows.num_computed[at] < rows.replay_until[at]):
            seq = rows.owner(at[i])
            next_event[i] = seq.next_event(int(rows.num_computed[at[i]]), int(next_event[i]))
        log_from = trigger.log_from(state, next_event)
        rows.next_event[at] = next_event
        self.blocks.log_from(at, log_from)
        return log_from

    def _row_state(self, at: IntArray) -> RowState:
        rows, layout = self.rows, self.blocks.layout
        entries = self.blocks.kv_lens[:, at].sum(axis=(0, 2), dtype=np.int32)
        return RowState(
            rows.num_prompt[at],
            rows.num_computed[at],
            -(-entries // layout.groups),
            rows.run_start[at],
            layout.block_size,
        )
