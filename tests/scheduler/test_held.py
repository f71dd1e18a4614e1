"""What a sequence holds at most, against the events of the conformance matrix."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvserve.engine.policies.registry import make_policy
from kvserve.scheduler.triggers.most_held import most_held
from tests.engine.policies.cases import CASES, PROMPT, SEEN, Case


@pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])
def test_the_most_is_that_of_the_known_events(case: Case) -> None:
    events = [(PROMPT, PROMPT), *(event for event in case.events if event[0] >= PROMPT)]
    if len(events) > 1 and events[1][0] == PROMPT:
        del events[0]
    most = max(held + then - seen for (seen, held), (then, _) in pairwise([*events, (SEEN, 0)]))
    assert most_held(case.make().event_trigger, PROMPT, SEEN, block_size=4) == most


def test_many_events_are_not_followed_one_by_one() -> None:
    """Kara's prompt, and 144 + 32 of every window of 512 + 32."""
    kara = make_policy({"name": "kara", "window": 512, "buffer": 32, "budget": 176, "period": 32})
    near, far = (most_held(kara.event_trigger, 1000, tokens, 16) for tokens in (100_000, 1_000_000))
    assert near == pytest.approx(1000 + 99_000 * 144 / 480, abs=600)
    assert far == pytest.approx(1000 + 999_000 * 144 / 480, rel=0.01)
