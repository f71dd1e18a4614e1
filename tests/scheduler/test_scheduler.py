"""What the scheduler promises, on a shadow of the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic
from kvserve.scheduler.triggers.pruning import Pruned
from tests.scheduler.traffic import (
    LAYOUT,
    LAYOUTS,
    TRIGGERS,
    Loop,
    assert_all_blocks_come_back,
    make_scheduler,
    make_sequence,
    policies_of,
    preempt_now_and_then,
)


def run_alone(
    prompt: int, output: int, policy: int, layout: KVLayout = LAYOUT
) -> tuple[Sequence, list[tuple[int, int]]]:
    loop = Loop(make_scheduler(200, layout))
    loop.scheduler.add(make_sequence(0, prompt, output, policy))
    (seq,) = loop.drain()
    return seq, loop.shadow.events[0]


def crowds() -> Iterator[Any]:
    """Layout, policy, blocks of host memory. All of them are slow; else each policy is met once, by
    turns with and without host memory, and each kind of trigger once in each layout."""
    kinds, met = set[tuple[KVLayout, type]](), set[int]()
    for at, layout in enumerate(LAYOUTS):
        for i in policies_of(layout):
            if not i or isinstance(TRIGGERS[i], EngineWide):
                continue
            kind = layout, type(TRIGGERS[i])
            first = i not in met or kind not in kinds
            kinds.add(kind)
            met.add(i)
            for host in (0, 200):
                marks = () if first and (i + at) % 2 == host // 200 else pytest.mark.slow
                name = f"{layout.granularity.name}-{i}-{host}"
                yield pytest.param(layout, i, host, marks=marks, id=name)


alone = cache(run_alone)


@pytest.mark.parametrize(("layout", "policy", "num_host_blocks"), list(crowds()))
def test_tokens_and_events_do_not_depend_on_the_crowd(
    layout: KVLayout, policy: int, num_host_blocks: int
) -> None:
    """Chunks, neighbours, preemptions and swaps change neither events nor what they take."""
    budget = 20 if isinstance(TRIGGERS[policy], Pruned) else 9
    scheduler = make_scheduler(
        100, layout, max_num_batched_tokens=budget, num_host_blocks=num_host_blocks
    )
    preempt_now_and_then(scheduler, np.random.default_rng(policy), 0.15)
    loop = Loop(scheduler)
    shapes = [(5, 60), (17, 40), (3, 70), (20, 50)]
    for seq_id, (prompt, output) in enumerate(shapes):
        scheduler.add(make_sequence(seq_id, prompt, output, policy))
    crowd = {seq.seq_id: seq for seq in loop.drain()}
    assert scheduler.totals.preemptions_total >= 2
    assert scheduler.totals.early_compactions_total == 0
    assert num_host_blocks or not scheduler.totals.swaps_total
    for seq_id, (prompt, output) in enumerate(shapes):
        single, events = alone(prompt, output, policy, layout)
        assert loop.shadow.events[seq_id] == events
        assert crowd[seq_id].usage.logical_tokens == single.usage.logical_tokens
        assert crowd[seq_id].usage.held_tokens == single.usage.held_tokens
        assert crowd[seq_id].usage.compactions == loop.shadow.compactions[seq_id] <= len(events)


def test_lengths_after_events_follow_the_worked_numbers() -> None:
    """W=768 U=32 N=225: run 767 -> 0 windows, 768 -> 1, 1504 -> 2, 2300 -> 3."""
    trigger = Periodic(window=768, buffer=32, keep=225, period=1)
    runs = np.array([767, 768, 1504, 2300])
    assert trigger.pending_windows(runs).tolist() == [0, 1, 2, 3]
    assert 2300 - 3 * trigger.compressible == 92
    assert 3 * (trigger.compressible - trigger.keep) == 1533


def test_events_are_due_at_whole_periods_of_the_sequence() -> None:
    _, events = run_alone(prompt=10, output=60, policy=1)
    # window 16, buffer 4, period 4: first at 10 + 16, then whenever 16 tokens are open again
    assert events[0] == (26, 1)
    assert all((position - 10) % 4 == 0 for position, _ in events)
    assert events[1] == (38, 1)


def test_logical_is_physical_plus_evicted_and_blocks_are_counted() -> None:
    seq, events = run_alone(prompt=10, output=60, policy=1)
    windows = sum(taken for _, taken in events)
    assert seq.usage.logical_tokens == 69  # the last token was sampled, never stored
    assert seq.usage.held_tokens == seq.usage.logical_tokens - windows * (12 - 4)
    assert seq.usage.held_entries == seq.usage.held_tokens * LAYOUT.num_layers * LAYOUT.num_kv_heads
    assert 0 < seq.usage.blocks_released <= windows * 2


def test_the_last_sequence_standing_ends_when_it_outgrows_the_pool() -> None:
    loop = Loop(make_scheduler(6))
    scheduler = loop.scheduler
    scheduler.add(make_sequence(0, 4, 100, policy=0))
    (seq,) = loop.drain()
    assert (seq.finish_reason, seq.usage.logical_tokens) == ("length", 20)
    assert_all_blocks_come_back(scheduler)


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize(("policy", "num_blocks"), [(0, 30), (1, 45)])
def test_many_prompts_of_nearly_the_whole_pool_all_finish(
    policy: int, num_blocks: int, num_host_blocks: int
) -> None:
    """No standstill and no storm."""
    loop = Loop(make_scheduler(num_blocks, num_host_blocks=num_host_blocks))
    scheduler = loop.scheduler
    for seq_id in range(32):
        scheduler.add(make_sequence(seq_id, prompt=100, output=25, policy=policy))
    assert len(loop.drain()) == 32
    assert 0 < scheduler.totals.preemptions_total <= 32


def test_the_engine_wide_schedule_takes_the_oldest_and_replays_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time every 5 steps, on whole blocks; a recomputed sequence ends up the same."""
    loop = Loop(make_scheduler(200, prefix_caching=False))
    scheduler = loop.scheduler
    for seq_id in range(4):
        scheduler.add(make_sequence(seq_id, prompt=6, output=50, policy=14))
    victim = 3
    steps: list[list[int]] = []
    before: list[tuple[int, int]] = []
    promote = scheduler.rows.promote_ready

    def preempt_once() -> None:
        promote()
        if len(steps) == 24:
            before.extend(loop.shadow.events[victim])
            scheduler.departures.preempt()

    monkeypatch.setattr(scheduler.rows, "promote_ready", preempt_once)
    while scheduler.has_work:
        owner, (output, _) = loop.shadow.owner.copy(), loop.step()
        events = output.events.compactions
        steps.append([int(owner[row]) for task in events for row in task.rows])
        assert all(task.plan.region_start[0] % 4 == 0 for task in events)
    first = next(i for i, taken in enumerate(steps) if taken)
    assert steps[first] == [0, 1] and steps[first + 5] == [2, 3]
    assert scheduler.totals.preemptions_total == 1 and before
    assert loop.shadow.events[victim][: len(before)] == before
    assert_all_blocks_come_back(scheduler)
