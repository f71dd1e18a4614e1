"""Events: who is due, what it takes of lengths and blocks, and when the next one comes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.gate import BreakEvenGate
from kvserve.scheduler.output import CompactionTask
from kvserve.scheduler.periodic import EngineWide
from kvserve.scheduler.rows import RowTable
from kvserve.scheduler.sequence import Sequence
from kvserve.scheduler.trigger import EventPlan, RowState, Trigger


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
        self._max_observed = max_observed
        self.gate = gate
        self._triggers: dict[int, Trigger] = {}
        self._steps_since: dict[int, int] = {}

    def register(self, seq: Sequence) -> None:
        """Know the trigger of a sequence's policy."""
        self._triggers[seq.policy_id] = seq.trigger
        if isinstance(seq.trigger, EngineWide):
            self._steps_since.setdefault(seq.policy_id, 0)

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

    def compact_due(self, entries_that_fit: int) -> tuple[CompactionTask, ...]:
        """Book events that are due.

        ``entries_that_fit`` is what the pool holds, if requests wait for it, otherwise 0.
        """
        plans = self._plans(self._due())
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
        plans = self._plans(np.concatenate([self._due(), *willing]))
        size = self.blocks.layout.block_size
        freed = np.concatenate(
            [np.zeros(0, int), *(-(-p.old // size) - -(-p.new // size) for p in plans)]
        )
        order = (-freed).argsort(kind="stable")
        enough = int(
            np.searchsorted(freed[order].cumsum(), -(-missing // self.blocks.layout.groups))
        )
        wanted = np.zeros(len(freed), bool)
        wanted[order[: enough + 1]] = freed[order[: enough + 1]] > 0
        before = self.compactions
        tasks = self._book(_chosen(plans, wanted), None)
        self.early_compactions += self.compactions - before
        return tasks

    def _due(self) -> IntArray:
        n = self.rows.num_rows
        due: IntArray = np.flatnonzero(self.rows.num_computed[:n] >= self.rows.next_event[:n])
        return due.astype(np.int32)

    def _plans(self, at: IntArray) -> list[_Plans]:
        """What events of rows ``at`` would do now, policy by policy."""
        plans = []
        for policy_id in np.unique(self.rows.policy_id[at]).tolist():
            part = at[self.rows.policy_id[at] == policy_id]
            plan = self._triggers[policy_id].plan(self._row_state(part))
            plans.append(_Plans(policy_id, part, plan, self.blocks.kv_lens[0, part, 0]))
        return plans

    def _that_pay(
        self, gate: BreakEvenGate, plans: list[_Plans], entries_that_fit: int
    ) -> list[_Plans]:
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
            pays |= rows.num_computed[at] < rows.replay_until[at]
            rows.next_event[at[~pays]] += period
            self.skipped += int(np.count_nonzero(~pays))
            passed.append(plan.part(pays))
        return passed

    def _book(self, plans: list[_Plans], max_observed: int | None) -> tuple[CompactionTask, ...]:
        """Book the events that fit a step and find their blocks; one task for each policy."""
        if not any(len(plan.at) for plan in plans):
            return ()
        freed = np.concatenate([plan.plan.evicted for plan in plans])
        observed = np.concatenate([plan.plan.observed for plan in plans])
        arrival = self.rows.arrival[np.concatenate([plan.at for plan in plans])]
        order = np.lexsort((arrival, -freed))
        fits = np.ones(len(order), bool)
        if max_observed is not None:
            fits[order[1:]] = observed[order].cumsum()[1:] <= max_observed
        tasks = []
        for plan in _chosen(plans, fits):
            best = np.lexsort((self.rows.arrival[plan.at], -plan.plan.evicted))
            plan = plan.part(best)
            count = self.blocks.affordable(plan.at, plan.plan.region_start, plan.new)
            if count:
                part = plan.part(slice(count))
                tasks.append(self._compact(part.policy_id, part.at, part.plan))
        return tuple(tasks)

    def _compact(self, policy_id: int, at: IntArray, plan: EventPlan) -> CompactionTask:
        """Book the events of rows ``at``; lengths and blocks are exact at once."""
        rows, blocks, size = self.rows, self.blocks, self.blocks.layout.block_size
        trigger = self._triggers[policy_id]
        token_ids = None if trigger.logs else rows.tokens_from(at, plan.query_start)
        old = blocks.kv_lens[0, at, 0]  # counts are equal in all groups
        new = old - plan.evicted
        rows.num_identity[at] = np.minimum(rows.num_identity[at], plan.region_start)
        copy_start = blocks.make_private(at, plan.region_start, new)
        released = blocks.truncate(at, np.broadcast_to(new[:, None], blocks.kv_lens[:, at].shape))
        rows.run_start[at] = plan.run_start
        log_from = self.expect(policy_id, at)
        rows.compactions[at] += 1
        for row, position in zip(at.tolist(), rows.num_computed[at].tolist(), strict=True):
            recorded = rows.owner(row).events
            if not recorded or position > recorded[-1]:
                recorded.append(position)
        rows.blocks_released[at] += released
        self.compactions += len(at)
        self.blocks_released += int(released.sum())
        self.tokens_evicted += int(plan.evicted.sum())
        first = copy_start // size
        width = int((-(-new // size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), blocks.kv.blocks.shape[3] - 1)
        # Advanced axes come first: [E, width, LG, R] -> [LG, E, R, width].
        dst_blocks = blocks.kv.blocks[:, at[:, None], :, columns].transpose(2, 0, 3, 1)
        return CompactionTask(policy_id, at, plan, old, copy_start, dst_blocks, log_from, token_ids)

    def expect(self, policy_id: int, at: IntArray) -> IntArray:
        """Work out when rows ``at`` are due next; returns from where they log queries."""
        rows = self.rows
        trigger, state = self._triggers[policy_id], self._row_state(at)
        next_event = trigger.next_event(state)
        for i in np.flatnonzero(rows.num_computed[at] < rows.replay_until[at]):
            seq = rows.owner(at[i])
            next_event[i] = seq.next_event(int(rows.num_computed[at[i]]), int(next_event[i]))
        log_from = trigger.log_from(state, next_event)
        rows.next_event[at] = next_event
        self.blocks.log_from(at, log_from)
        return log_from

    def _row_state(self, at: IntArray) -> RowState:
        rows = self.rows
        lengths = self.blocks.kv_lens[0, at, 0]
        return RowState(
            rows.num_prompt[at],
            rows.num_computed[at],
            lengths,
            rows.run_start[at],
            self.blocks.layout.block_size,
        )


@dataclass(frozen=True, slots=True)
class _Plans:
    """Events of one policy that could be booked: rows ``at``, which hold ``old`` entries."""

    policy_id: int
    at: IntArray
    plan: EventPlan
    old: IntArray

    @property
    def new(self) -> IntArray:
        return self.old - self.plan.evicted

    def part(self, at: IntArray | slice) -> _Plans:
        return _Plans(self.policy_id, self.at[at], self.plan.part(at), self.old[at])


def _chosen(plans: list[_Plans], mask: IntArray) -> list[_Plans]:
    """The events that ``mask`` names, over all ``plans`` in order."""
    ends = np.cumsum([len(plan.at) for plan in plans])
    return [
        plan.part(mask[end - len(plan.at) : end]) for plan, end in zip(plans, ends, strict=True)
    ]
