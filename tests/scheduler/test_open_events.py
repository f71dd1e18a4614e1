"""Events that are scored before they are scheduled, and what becomes of answers."""

from __future__ import annotations

from kvserve.scheduler.step.recovery import newest_of, start_over
from tests.scheduler.shadow import ShadowRunner
from tests.scheduler.traffic import LAYOUTS, drain, make_scheduler, make_sequence


def test_an_event_is_scored_and_then_carried_out() -> None:
    """Policy 17 keeps unequal counts: its event is scored in one step and applied in the next."""
    scheduler = make_scheduler(60, LAYOUTS[1])
    shadow, events = ShadowRunner(scheduler), scheduler.events
    scheduler.add(make_sequence(0, 26, 40, policy=17))
    while not events.scoring:
        output = scheduler.schedule()
        if not events.scoring:
            scheduler.update(output, shadow.run(output), shadow.scores)
    assert events.scoring == {0} and output.events.observations and not output.num_tokens
    scheduler.update(output, shadow.run(output), shadow.scores)
    (task,) = output.events.observations
    assert events._answers.keys() == {(0, int(task.plan.query_start[0]))} and not events.scoring
    output = scheduler.schedule()
    assert output.events.compactions and not events._answers
    scheduler.update(output, shadow.run(output), shadow.scores)


def test_the_events_of_a_step_that_fails_are_due_again() -> None:
    scheduler = make_scheduler(60, LAYOUTS[1])
    shadow, events = ShadowRunner(scheduler), scheduler.events
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 26, 40, policy=17))
    while not events.scoring:
        output = scheduler.schedule()
        if not events.scoring:
            scheduler.update(output, shadow.run(output), shadow.scores)
    newest = newest_of(scheduler, output, None)
    assert newest is not None and newest.seq_id == 1
    ended, _ = start_over(scheduler, {1})
    assert ended == [newest] and len(scheduler.waiting) == 1
    assert not scheduler.events.scoring and not scheduler.events._answers
    drain(scheduler, ShadowRunner(scheduler))
    assert scheduler.totals.compactions_total
