"""Random traffic through the real scheduler against a shadow of the device."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.scheduler import Scheduler
from kvserve.scheduler.sequence import Sequence, SequenceStatus
from kvserve.scheduler.trigger import (
    AtPrefillEnd,
    Bounded,
    Budget,
    EngineWide,
    EveryStep,
    Never,
    Periodic,
    Trigger,
    WhenOver,
)
from tests.scheduler.shadow import ShadowRunner

TRIGGERS: dict[int, Trigger] = {
    0: Never(),
    1: Periodic(16, 4, 4, 4),
    2: Periodic(9, 0, 5, 3),
    3: Periodic(12, 3, 2, 5, protect_prompt=False),
    4: Periodic(12, 3, 2, 1, logs=False),
    5: AtPrefillEnd(Budget(tokens=10), num_queries=4),
    6: AtPrefillEnd(Budget(ratio=Fraction(1, 3), least=5), num_queries=0),
    7: WhenOver(24, 15, num_queries=5, protect_prompt=False),
    8: WhenOver(17, 9, num_queries=3, protect_prompt=True),
    9: Bounded(10, 19, num_queries=4),
    10: Bounded(7, 15, num_queries=2, block=6),
    11: Bounded(9, None, num_queries=0, block=5),
    12: EveryStep(14),
    13: EveryStep(9, generated=False),
    14: EngineWide(window=8, buffer=2, keep=3, period=5, most=2),
}
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)


def make_scheduler(num_blocks: int = 60, **settings: object) -> Scheduler:
    defaults: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "log_block_tokens": 8,
        "admission_reserve": 4,
    }
    return Scheduler(LAYOUT, num_blocks, **{**defaults, **settings})  # type: ignore[arg-type]


def make_sequence(seq_id: int, prompt: int, output: int, policy: int) -> Sequence:
    tokens = np.arange(prompt, dtype=np.int32) + 2
    return Sequence(seq_id, tokens, prompt, prompt + output, (), policy, TRIGGERS[policy])


def drain(scheduler: Scheduler, shadow: ShadowRunner, limit: int = 3000) -> list[Sequence]:
    finished: list[Sequence] = []
    for _ in range(limit):
        if not scheduler.has_work:
            return finished
        output = scheduler.schedule()
        finished += scheduler.update(output, shadow.run(output))
        scheduler.check_integrity()
    raise AssertionError("no end in sight")


@pytest.mark.parametrize("seed", range(9))
def test_random_traffic_keeps_every_row_true(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunked = bool(rng.integers(2))
    budget = 32 if chunked else 128  # without chunks a whole sequence must fit a step
    scheduler = make_scheduler(
        int(rng.integers(30, 70)),
        chunked_prefill=chunked,
        max_num_batched_tokens=budget,
        prefix_caching=bool(seed % 3),
    )
    shadow = ShadowRunner(scheduler, TRIGGERS)
    alive: list[Sequence] = []
    finished: list[Sequence] = []
    added = 0
    for _ in range(400):
        if rng.random() < 0.25:
            prompt, more = int(rng.integers(1, 30)), int(rng.integers(1, 70))
            seq = make_sequence(added, prompt, more, int(rng.integers(len(TRIGGERS))))
            needed = scheduler.blocks_at_least(prompt, seq.max_len, seq.trigger)
            assert needed <= scheduler.pool.capacity
            scheduler.add(seq)
            alive.append(seq)
            added += 1
        if alive and rng.random() < 0.05:
            victim = alive[int(rng.integers(len(alive)))]
            if victim.status is not SequenceStatus.FINISHED:
                scheduler.finish(victim, "abort")
        output = scheduler.schedule()
        assert output.num_tokens <= budget
        finished += scheduler.update(output, shadow.run(output))
        scheduler.check_integrity()
        alive = [seq for seq in alive if seq.status is not SequenceStatus.FINISHED]
    finished += drain(scheduler, shadow)
    assert_all_blocks_come_back(scheduler)
    assert scheduler.events.compactions > 0
    assert any(seq.finish_reason == "length" for seq in finished)


def assert_all_blocks_come_back(scheduler: Scheduler) -> None:
    assert scheduler.blocks.headroom == scheduler.pool.capacity
    if scheduler.blocks.prefix_cache is not None:
        scheduler.blocks.prefix_cache.clear()
    assert scheduler.pool.num_free == scheduler.pool.capacity


def run_alone(prompt: int, output: int, policy: int, **settings: object) -> tuple[Sequence, list]:
    scheduler = make_scheduler(200, **settings)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    scheduler.add(make_sequence(0, prompt, output, policy))
    (seq,) = drain(scheduler, shadow)
    return seq, shadow.events[0]


ALONE = [i for i, trigger in TRIGGERS.items() if i and not isinstance(trigger, EngineWide)]


@pytest.mark.parametrize("policy", ALONE)
def test_tokens_and_events_do_not_depend_on_the_crowd(
    policy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, neighbours and preemptions change neither when events run nor what they take."""
    scheduler = make_scheduler(40, max_num_batched_tokens=9)
    rng, make_room = np.random.default_rng(policy), scheduler._make_room_for_decodes

    def preempt_now_and_then() -> None:
        if scheduler.rows.num_rows > 1 and rng.random() < 0.15:
            scheduler._preempt_newest()
        make_room()

    monkeypatch.setattr(scheduler, "_make_room_for_decodes", preempt_now_and_then)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    shapes = [(5, 60), (17, 40), (3, 70), (20, 50), (11, 60), (8, 44)]
    for seq_id, (prompt, output) in enumerate(shapes):
        scheduler.add(make_sequence(seq_id, prompt, output, policy))
    crowd = {seq.seq_id: seq for seq in drain(scheduler, shadow)}
    assert scheduler.num_preemptions >= 2
    for seq_id, (prompt, output) in enumerate(shapes):
        alone, events = run_alone(prompt, output, policy)
        assert shadow.events[seq_id] == events
        assert crowd[seq_id].logical_tokens == alone.logical_tokens
        assert crowd[seq_id].held_tokens == alone.held_tokens
        assert crowd[seq_id].compactions == len(events)


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
    assert seq.logical_tokens == 69  # the last token was sampled, never stored
    assert seq.held_tokens == seq.logical_tokens - windows * (12 - 4)
    assert seq.held_entries == seq.held_tokens * LAYOUT.num_layers * LAYOUT.num_kv_heads
    assert 0 < seq.blocks_released <= windows * 2


def test_the_last_sequence_standing_ends_when_it_outgrows_the_pool() -> None:
    scheduler = make_scheduler(6)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    scheduler.add(make_sequence(0, 4, 100, policy=0))
    (seq,) = drain(scheduler, shadow)
    assert (seq.finish_reason, seq.logical_tokens) == ("length", 20)
    assert_all_blocks_come_back(scheduler)


def test_preemption_takes_the_newest_and_the_oldest_goes_on() -> None:
    scheduler = make_scheduler(10)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 4, 24, policy=0))
    finished = drain(scheduler, shadow)
    assert [seq.seq_id for seq in finished] == [0, 1, 2]
    assert scheduler.num_preemptions > 0


def test_a_compaction_never_writes_a_shared_block() -> None:
    """A block with a second reference is replaced, and its earlier entries move along."""
    scheduler = make_scheduler(60)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    scheduler.add(make_sequence(0, prompt=6, output=40, policy=1))
    shared = None
    while scheduler.has_work:
        output = scheduler.schedule()
        if scheduler.rows.num_computed[0] == 21:
            shared = scheduler.blocks.kv.blocks[0, 0, 0, 1:3].copy()
            scheduler.pool.share(shared)
            before = {slot: entry for slot, entry in shadow.memory.items() if slot[0] in shared}
        scheduler.update(output, shadow.run(output))
    assert shared is not None
    assert {slot: shadow.memory[slot] for slot in before} == before
    scheduler.pool.release(shared)
    assert_all_blocks_come_back(scheduler)


def test_many_prompts_of_nearly_the_whole_pool_all_finish() -> None:
    scheduler = make_scheduler(30)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    for seq_id in range(12):
        scheduler.add(make_sequence(seq_id, prompt=100, output=10, policy=0))
    assert len(drain(scheduler, shadow)) == 12
    assert scheduler.num_preemptions <= 12


def test_the_engine_wide_schedule_takes_the_oldest_and_replays_what_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a time every 5 steps, on whole blocks; a recomputed sequence ends up the same."""
    scheduler = make_scheduler(200, prefix_caching=False)
    shadow = ShadowRunner(scheduler, TRIGGERS)
    for seq_id in range(4):
        scheduler.add(make_sequence(seq_id, prompt=6, output=50, policy=14))
    victim = 3
    steps: list[list[int]] = []
    before: list[tuple[int, int]] = []
    make_room = scheduler._make_room_for_decodes

    def preempt_once() -> None:
        if len(steps) == 24:
            before.extend(shadow.events[victim])
            scheduler._preempt_newest()
        make_room()

    monkeypatch.setattr(scheduler, "_make_room_for_decodes", preempt_once)
    while scheduler.has_work:
        output = scheduler.schedule()
        taken = [int(shadow.owner[row]) for task in output.compactions for row in task.rows]
        scheduler.update(output, shadow.run(output))
        scheduler.check_integrity()
        steps.append(taken)
        assert all(task.plan.region_start[0] % 4 == 0 for task in output.compactions)
    first = next(i for i, taken in enumerate(steps) if taken)
    assert steps[first] == [0, 1] and steps[first + 5] == [2, 3]
    assert scheduler.num_preemptions == 1 and before
    assert shadow.events[victim][: len(before)] == before
    assert_all_blocks_come_back(scheduler)
