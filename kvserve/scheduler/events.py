"""Events: who is due, what it takes of lengths and blocks, and when the next one comes."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.block_manager import BlockManager
from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.output import CompactionTask
from kvserve.scheduler.rows import RowTable
from kvserve.scheduler.sequence import Sequence
from kvserve.scheduler.trigger import NO_EVENT, EngineWide, EventPlan, RowState, Trigger


class EventBook:
    """Books the events of all rows; lengths and blocks are exact as soon as one is booked."""

    def __init__(self, rows: RowTable, blocks: BlockManager) -> None:
        self.rows = rows
        self.blocks = blocks
        self.compactions = 0
        self.blocks_released = 0
        self.tokens_evicted = 0
        self._triggers: dict[int, Trigger] = {}
        self._engine_wide: dict[int, EngineWide] = {}
        self._steps_since: dict[int, int] = {}

    def register(self, seq: Sequence) -> None:
        """Know the trigger of a sequence's policy."""
        self._triggers[seq.policy_id] = seq.trigger
        if isinstance(seq.trigger, EngineWide):
            self._engine_wide[seq.policy_id] = seq.trigger
            self._steps_since.setdefault(seq.policy_id, 0)

    def take_engine_wide(self) -> None:
        """Make rows due whose trigger counts the engine's steps."""
        rows = self.rows
        for policy_id, trigger in self._engine_wide.items():
            at = np.flatnonzero(rows.policy_id[: rows.num_decoding] == policy_id)
            if not len(at):
                continue
            self._steps_since[policy_id] += 1
            if self._steps_since[policy_id] % trigger.period:
                continue
            at = at[trigger.eligible(self._row_state(at))]
            for row in at[rows.arrival[at].argsort()][: trigger.most]:
                seq = rows.sequences[row]
                assert seq is not None
                rows.next_event[row] = rows.num_computed[row]
                seq.engine_events.append(int(rows.num_computed[row]))
                self._steps_since[policy_id] = 0

    def compact_due(self) -> tuple[CompactionTask, ...]:
        """Book every event that is due and finds its blocks; one task for each policy."""
        rows, n = self.rows, self.rows.num_rows
        due = np.flatnonzero(rows.num_computed[:n] >= rows.next_event[:n]).astype(np.int32)
        due = due[rows.arrival[due].argsort(kind="stable")]
        tasks = []
        for policy_id in np.unique(rows.policy_id[due]).tolist():
            at = due[rows.policy_id[due] == policy_id]
            plan = self._triggers[policy_id].plan(self._row_state(at))
            new = self.blocks.kv_lens[0, at, 0] - plan.evicted
            count = self.blocks.affordable(at, plan.region_start, new)
            if count:
                tasks.append(self._compact(policy_id, at[:count], plan.part(slice(count))))
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
        trigger, state = self._triggers[policy_id], self._row_state(at)
        next_event = trigger.next_event(state)
        if policy_id in self._engine_wide:
            next_event = np.array([self._next_replayed(row) for row in at], np.int32)
        log_from = trigger.log_from(state, next_event)
        self.rows.next_event[at] = next_event
        self.blocks.log_from(at, log_from)
        return log_from

    def _next_replayed(self, row: int) -> int:
        """Position of the next recorded event of a row that catches up."""
        seq = self.rows.sequences[row]
        assert seq is not None
        later = (p for p in seq.engine_events if p > self.rows.num_computed[row])
        return min(later, default=NO_EVENT)

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
