"""The life of an event: which states follow each other, and what becomes of answers."""

from __future__ import annotations

import numpy as np
import pytest

from kvserve.scheduler.compression.lives import OpenEvent
from kvserve.scheduler.messages.event import (
    NEXT_STATES,
    CodeCounts,
    EventKind,
    EventState,
    KeptColumns,
    KeptCounts,
    answer,
)
from tests.scheduler.shadow import ShadowRunner
from tests.scheduler.traffic import LAYOUTS, make_scheduler, make_sequence


@pytest.mark.parametrize("state", EventState)
def test_an_event_goes_on_to_its_next_states_alone(state: EventState) -> None:
    event = OpenEvent(state, 7)
    for other in EventState:
        if other in NEXT_STATES[state]:
            assert event.to(other) == OpenEvent(other, 7)
        else:
            with pytest.raises(AssertionError, match=f"{state.value} -> {other.value}"):
                event.to(other)


def test_an_answer_has_the_type_of_its_kind() -> None:
    found = np.arange(24).reshape(1, 2, 3, 4)
    assert isinstance(answer(EventKind.UNEVEN, found[..., 0]), KeptCounts)
    assert isinstance(answer(EventKind.PRUNED, found[..., 0]), KeptCounts)
    columns, codes = (answer(kind, found) for kind in (EventKind.BLOCKS, EventKind.CODED))
    assert isinstance(columns, KeptColumns) and columns.columns is found
    assert isinstance(codes, CodeCounts)
    assert (codes.entries == found[..., 0]).all() and (codes.vectors == found[..., 1]).all()


def test_an_event_passes_all_its_states() -> None:
    """Policy 17 keeps unequal counts: its event is scored in one step and applied in the next."""
    scheduler = make_scheduler(60, LAYOUTS[1])
    shadow, lives = ShadowRunner(scheduler), scheduler.events.lives
    scheduler.add(make_sequence(0, 26, 40, policy=17))
    while not lives.scoring:
        output = scheduler.schedule()
        if not lives.scoring:
            scheduler.update(output, shadow.run(output), shadow.scores)
    assert lives.is_scoring(0) and output.observations and not output.num_tokens
    scheduler.update(output, shadow.run(output), shadow.scores)
    (task,) = output.observations
    start = int(task.plan.query_start[0])
    assert lives.scored(0, start) is not None and lives.scored(0, start + 1) is None
    output = scheduler.schedule()
    assert output.compactions and lives.scored(0, start) is None
    assert lives.entered[EventState.SCHEDULED] == 1 and not lives.entered[EventState.APPLIED]
    scheduler.update(output, shadow.run(output), shadow.scores)
    assert lives.entered[EventState.APPLIED] == 1


def test_the_events_of_a_step_that_fails_are_due_again() -> None:
    scheduler = make_scheduler(60, LAYOUTS[1])
    shadow, lives = ShadowRunner(scheduler), scheduler.events.lives
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 26, 40, policy=17))
    while not lives.scoring:
        output = scheduler.schedule()
        if not lives.scoring:
            scheduler.update(output, shadow.run(output), shadow.scores)
    scheduler.give_up(output)
    assert not lives.scoring and not lives.entered[EventState.SCORING]
    assert len(scheduler.waiting) == 1
