"""Events that wait for others: when they do, for how long, and that nothing depends on it."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np
import pytest

from kvserve.scheduler.compression import gathering
from kvserve.scheduler.compression.candidates import ScheduledEvents
from kvserve.scheduler.compression.compression_scheduler import CompressionScheduler
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic
from kvserve.scheduler.triggers.trigger import EveryStep, Trigger, WhenOver
from tests.scheduler.shadow import ShadowRunner
from tests.scheduler.traffic import LAYOUTS, Loop, make_scheduler

PERIODIC = Periodic(window=32, buffer=0, keep=8, period=32)
OTHER = Periodic(window=32, buffer=0, keep=9, period=32)
PROMPT, OUTPUT = 6, 150


@dataclass
class Ran:
    scheduler: Scheduler
    shadow: ShadowRunner
    steps: dict[int, list[int]]
    """The steps in which each sequence had its events."""

    @property
    def first(self) -> dict[int, int]:
        """The step of each one's first event."""
        return {seq_id: steps[0] for seq_id, steps in self.steps.items()}


def run(
    begins: list[int],
    triggers: list[Trigger] | None = None,
    *,
    outputs: list[int] | None = None,
    blocks: int = 400,
    layout: int = 0,
    observed: int = 1_000,
) -> Ran:
    """Sequences that arrive at these steps, with a check of everything after each step."""
    triggers = triggers or [PERIODIC] * len(begins)
    outputs = outputs or [OUTPUT] * len(begins)
    scheduler = make_scheduler(
        blocks,
        LAYOUTS[layout],
        max_num_seqs=len(begins),
        max_num_batched_tokens=200,
        max_observed_tokens=observed,
        max_model_len=256,
        prefix_caching=False,
    )
    shadow, steps = ShadowRunner(scheduler), defaultdict[int, list[int]](list)
    loop = Loop(scheduler, shadow)
    for at in range(2_000):
        for i in np.flatnonzero(np.array(begins) == at).tolist():
            tokens, policy = np.arange(PROMPT, dtype=np.int32), triggers.index(triggers[i])
            end = PROMPT + outputs[i]
            scheduler.add(Sequence(i, tokens, PROMPT, end, (), policy, triggers[i]))
        output, _ = loop.step()
        for task in output.compactions:
            for seq_id in task.seq_ids.tolist():
                steps[seq_id].append(at)
        if at > max(begins) and not scheduler.has_work:
            return Ran(scheduler, shadow, steps)
    raise AssertionError("no end in sight")


def alone(*args: object, **settings: object) -> Ran:
    """The same where no event waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathering, "_MOST", 0)
        ran = run(*args, **settings)  # type: ignore[arg-type]
    assert not ran.scheduler.events.gathering.row_steps
    return ran


def test_one_step_has_the_events_of_rows_that_are_due_soon() -> None:
    """From the first event on they stay together, and each has the same events as alone."""
    begins = [0, 0, *[2] * 6]
    ran, before = run(begins), alone(begins)
    assert len({tuple(steps) for steps in ran.steps.values()}) == 1
    assert len(set(before.first.values())) == 2
    assert ran.scheduler.events.gathering.row_steps == 2 * 2
    assert ran.shadow.events == before.shadow.events
    assert ran.scheduler.num_steps == before.scheduler.num_steps


@pytest.mark.parametrize(
    ("begins", "late"),
    [
        ([0, 3], 2),  # a token of one is not worth it
        ([0] * 7 + [2], 2),  # the wait of seven for one
        ([0, *[5] * 15], 2),  # longer than an eighth of 32 tokens
    ],
)
def test_an_event_does_not_wait_where_that_costs_more(begins: list[int], late: int) -> None:
    ran = run(begins)
    assert len(set(ran.first.values())) == late
    assert ran.shadow.events == alone(begins).shadow.events


def test_no_event_waits_for_one_after_the_other() -> None:
    """Each row is due two steps behind the one before; none waits for more than four."""
    begins = list(range(0, 28, 2))
    ran, before = run(begins), alone(begins)
    waited = [ran.first[i] - before.first[i] for i in range(len(begins))]
    assert max(waited) == 4 and 0 in waited[1:-1]
    assert ran.shadow.events == before.shadow.events


def test_events_of_other_policies_are_not_waited_for() -> None:
    begins = [0, *[2] * 7]
    ran = run(begins, [PERIODIC, *[OTHER] * 7])
    assert ran.first[0] == min(ran.first.values()) < ran.first[1]


def test_rows_that_end_before_their_event_are_not_waited_for() -> None:
    ran = run([0, *[2] * 7], outputs=[OUTPUT, *[30] * 7])
    assert not ran.scheduler.events.gathering.row_steps and set(ran.steps) == {0}


@pytest.mark.parametrize("trigger", [EveryStep(7), EngineWide(8, 2, 3, period=5, most=2)], ids=str)
def test_events_that_come_often_or_by_the_steps_never_wait(trigger: Trigger) -> None:
    ran = run([0, *[2] * 7], [trigger] * 8)
    assert ran.steps and not ran.scheduler.events.gathering.row_steps


def test_events_that_are_scored_before_do_not_wait_again() -> None:
    """What they keep differs by layer: a step scores all of them, and the next one moves."""
    over: list[Trigger] = [WhenOver(48, 20, num_queries=5, protect_prompt=False)] * 8
    ran = run([0, *[2] * 7], over, layout=1)
    assert len(set(ran.first.values())) == 1 and ran.scheduler.events.gathering.row_steps == 2


def test_no_event_waits_for_those_that_one_step_has_no_room_for() -> None:
    """Two events of 32 queries each fill a step."""
    begins = [0, 0, *[2] * 6]
    assert run(begins, observed=96).scheduler.events.gathering.row_steps
    assert not run(begins, observed=64).scheduler.events.gathering.row_steps


def test_nothing_waits_while_blocks_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each event would free some."""
    steps = Counter[tuple[bool, bool]]()
    compact_due = CompressionScheduler.compact_due

    def noted(self: CompressionScheduler, entries: int, *, may_wait: bool) -> ScheduledEvents:
        calm = may_wait and self.rows.num_rows <= self.blocks.headroom / self.blocks.num_lanes
        scheduled = compact_due(self, entries, may_wait=may_wait)
        assert calm or not self.gathering
        steps[calm, bool(self.gathering)] += 1
        return scheduled

    monkeypatch.setattr(CompressionScheduler, "compact_due", noted)
    assert run([0, *[2] * 7] * 2, blocks=150).scheduler.num_preemptions
    assert steps[True, True] and steps[False, False] > 10
