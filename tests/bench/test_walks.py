"""What the counting of functions and files calls entered, and given."""

from __future__ import annotations

from bench.walks import Walk
from kvserve.config import EngineConfig


def test_a_walk_has_what_is_entered_and_who_called_it() -> None:
    with Walk() as walk:
        EngineConfig()
    by_name = {code.co_name: code for code in walk.callers}
    assert {"__post_init__", "check_limits", "number_wanted"} <= by_name.keys()
    callers = walk.callers[by_name["check_limits"]]
    assert {caller and caller.co_name for caller in callers} == {"__post_init__"}
    assert 0 < walk.jumps < walk.calls
    with Walk() as other:
        EngineConfig.from_flat()
    assert {code.co_name for code in other.without(walk).callers} == {"from_flat"}
