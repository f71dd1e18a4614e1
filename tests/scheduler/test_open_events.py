"""Events that are scored before they are scheduled, and what becomes of answers."""

from __future__ import annotations

from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.step.recovery import newest_of, start_over
from tests.scheduler.traffic import LAYOUTS, Loop, make_scheduler, make_sequence


def scored(loop: Loop) -> SchedulerOutput:
    """The first step that scores an event. It has not run yet."""
    while True:
        output = loop.scheduler.schedule()
        if loop.scheduler.events.scoring:
            return output
        loop.scheduler.update(output, loop.shadow.run(output), loop.shadow.scores)


def test_an_event_is_scored_and_then_carried_out() -> None:
    """Policy 17 keeps unequal counts: its event is scored in one step and applied in the next."""
    loop = Loop(make_scheduler(60, LAYOUTS[1]))
    loop.scheduler.add(make_sequence(0, 26, 40, policy=17))
    output, events = scored(loop), loop.scheduler.events.of_steps()
    assert events.scoring == {0} and output.events.observations and not output.num_tokens
    loop.scheduler.update(output, loop.shadow.run(output), loop.shadow.scores)
    (task,) = output.events.observations
    assert events._answers.keys() == {(0, int(task.plan.query_start[0]))} and not events.scoring
    output, _ = loop.step()
    assert output.events.compactions and not events._answers


def test_the_events_of_a_step_that_fails_are_due_again() -> None:
    loop = Loop(make_scheduler(60, LAYOUTS[1]))
    scheduler = loop.scheduler
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 26, 40, policy=17))
    newest = newest_of(scheduler, scored(loop), None)
    assert newest is not None and newest.seq_id == 1
    ended, _ = start_over(scheduler, {1})
    assert ended == [newest] and len(scheduler.waiting) == 1
    assert scheduler.events.of_steps.made is None, "what was scored is forgotten"
    Loop(scheduler).drain()
    assert scheduler.totals.compactions_total
