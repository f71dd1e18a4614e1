"""What the counting of functions and files calls entered, and given."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from bench.walks import Walk, _is_given
from kvserve.config import EngineConfig
from kvserve.engine.policies.registry import make_policy


def test_a_walk_has_what_is_entered_and_who_called_it() -> None:
    with Walk() as walk:
        EngineConfig()
    by_name = {code.co_name: code for code in walk.callers}
    assert {"__post_init__", "check_limits", "checks"} <= by_name.keys()
    callers = walk.callers[by_name["check_limits"]]
    assert {caller and caller.co_name for caller in callers} == {"__post_init__"}
    assert 0 < walk.jumps < walk.calls
    with Walk() as other:
        EngineConfig.from_flat()
    assert {code.co_name for code in other.without(walk).callers} == {"from_flat"}


def test_the_field_is_found_in_every_form() -> None:
    def frame(**given: Any) -> FrameType:
        return sys._getframe()

    kara = make_policy({"name": "kara", "max_chunk": 6})
    value: Any
    for value in ("--policy.max_chunk", {"max_chunk": 6}, ["--x", "max_chunk=6"], kara):
        assert _is_given(frame(value=value)), value
    for value in ("--policy.window", {"window": 6}, [6], make_policy("none"), EngineConfig()):
        assert not _is_given(frame(value=value)), value
