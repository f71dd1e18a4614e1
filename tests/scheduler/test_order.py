"""Who goes first: priorities, the order of events, and early events."""

from __future__ import annotations

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.triggers.periodic import Periodic
from kvserve.scheduler.triggers.trigger import Never, RowState
from kvserve.scheduler.triggers.whole_row import WhenOver
from tests.scheduler.traffic import (
    CODES,
    IN_PROMPT,
    LAYOUTS,
    TRIGGERS,
    UNEVEN,
    Loop,
    make_scheduler,
    make_sequence,
)


def test_lower_priorities_are_admitted_first_and_make_way_last() -> None:
    loop = Loop(make_scheduler(14, max_num_seqs=2, prefix_caching=False))
    scheduler = loop.scheduler
    for seq_id, priority in enumerate([5, 0, 5, 1]):
        scheduler.add(make_sequence(seq_id, 8, 24, policy=0, priority=priority))
    assert [seq.seq_id for seq in scheduler.waiting] == [1, 3, 0, 2]
    finished = [seq.seq_id for seq in loop.drain()]
    assert scheduler.totals.preemptions_total > 0
    assert finished == [1, 3, 0, 2]


def test_a_step_observes_what_its_budget_allows_and_most_freed_goes_first() -> None:
    """Runs of 20, 16 and 28 tokens are due together: 2, 1 and 3 windows of 9."""
    loop = Loop(make_scheduler(90, max_observed_tokens=9, prefix_caching=False))
    scheduler = loop.scheduler
    sequences = [make_sequence(i, 4, 60, policy=2) for i in range(3)]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.rows.num_decoding < 3:
        loop.step()
    held_back = scheduler.rows.next_event[:3].copy()
    scheduler.rows.next_event[:3] = 10**6
    while scheduler.rows.num_computed[0] < 32:
        loop.step()
    assert (held_back < 32).all()
    scheduler.rows.first_uncompressed_pos[:3] += np.array([8, 12, 0], np.int32)
    scheduler.rows.next_event[:3] = scheduler.rows.num_computed[:3]
    taken = []
    for _ in range(3):
        owner, (output, _) = loop.shadow.owner.copy(), loop.step()
        (task,) = output.events.compactions
        taken.append((owner[task.rows].tolist(), task.plan.windows.tolist()))
        waiting = 3 - len(taken)
        assert output.num_decoding == 3 - waiting, "who waits for an event sits the step out"
    assert taken == [([2], [3]), ([0], [2]), ([1], [1])]


class Unwilling(Periodic):
    """Events come when they are due, whatever the pressure."""

    def can_compress_early(self, rows: RowState) -> IntArray:
        return np.zeros(len(rows.num_prompt), bool)


def test_events_come_early_before_somebody_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Period 25 leaves full windows behind that a small pool has no room for."""
    seen = []
    for trigger, num_blocks in ((Periodic, 120), (Periodic, 48), (Unwilling, 48)):
        monkeypatch.setitem(TRIGGERS, 15, trigger(14, 2, 4, 25))
        loop = Loop(make_scheduler(num_blocks))
        scheduler = loop.scheduler
        for seq_id in range(6):
            scheduler.add(make_sequence(seq_id, 6, 38, policy=15))
        assert len(loop.drain()) == 6
        seen.append(
            (scheduler.totals.early_compactions_total > 0, scheduler.totals.preemptions_total)
        )
    ample, willing, unwilling = seen
    assert ample == (False, 0)
    assert willing[0] and not unwilling[0] and willing[1] < unwilling[1]


def test_an_observation_is_void_if_its_sequence_begins_anew_in_the_same_step() -> None:
    """The prompt's event comes in the next step; it must not take the counts of the later one."""
    loop = Loop(make_scheduler(60, LAYOUTS[1], prefix_caching=False))
    scheduler = loop.scheduler
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 26, 40, policy=17))
    promote, observed = scheduler.rows.promote_ready, 0

    def preempt_once() -> None:
        promote()
        if observed == 2:
            scheduler.departures.preempt()

    scheduler.rows.promote_ready = preempt_once  # type: ignore[method-assign]
    compact_due = scheduler.events.compact_due

    def count() -> ScheduledEvents:
        nonlocal observed
        scheduled = compact_due()
        observed += any(1 in task.seq_ids for task in scheduled.observations)
        return scheduled

    scheduler.events.compact_due = count  # type: ignore[method-assign]
    while scheduler.has_work:
        loop.step()
        observed += observed == 2
    assert scheduler.totals.preemptions_total == 1 and observed > 3


def test_a_bounded_sequence_holds_the_blocks_of_its_bound() -> None:
    """1,500 tokens of which 320 are kept: 21 blocks of 16 and not 94."""
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=16)
    trigger = WhenOver(limit=336, keep=320, num_queries=0, protect_prompt=False)
    held = {}
    for policy, how in ((0, Never()), (1, trigger)):
        settings = {"max_num_batched_tokens": 512, "max_model_len": 2048}
        scheduler = make_scheduler(200, layout, max_num_seqs=1, **settings)
        seq = Sequence(0, np.arange(100, dtype=np.int32), 100, 1501, (), policy, how)
        scheduler.add(seq)
        while scheduler.has_work:
            output = scheduler.schedule()
            scheduler.update(output, np.full(len(output.sampled), 7))
        held[policy] = seq.usage.peak_blocks
    assert held == {0: 94, 1: 21}


def test_freed_blocks_let_more_sequences_run_at_once() -> None:
    """Admission counts what is held, so compression turns into concurrency at once."""
    running = {}
    for policy in (0, 7):
        loop = Loop(make_scheduler(60, max_num_seqs=16))
        scheduler = loop.scheduler
        for seq_id in range(40):
            scheduler.add(make_sequence(seq_id, 6, 115, policy=policy))
        counts = []
        while scheduler.waiting:
            loop.step()
            counts.append(len(scheduler.running))
        running[policy] = np.mean(counts)
    assert running[7] > 1.3 * running[0]


@pytest.mark.parametrize("policy", sorted(set(TRIGGERS) - IN_PROMPT))
def test_nothing_is_compacted_before_the_prompt_is_in(policy: int) -> None:
    """Policies that say so aside; chunks of nine tokens."""
    layout = LAYOUTS[2 if policy in CODES else 1 if policy in UNEVEN else 0]
    loop = Loop(make_scheduler(120, layout, max_num_batched_tokens=9))
    loop.scheduler.add(make_sequence(0, 40, 60, policy=policy))
    loop.drain()
    assert all(position >= 40 for position, _ in loop.shadow.events[0])
    assert bool(loop.shadow.events[0]) == bool(policy)
