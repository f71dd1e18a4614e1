"""What the counting of functions and files calls entered, and given; what an answer imports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.walks import IMPORTING, Walk, imported_lines
from kvserve.config import EngineConfig

BUDGET = Path(__file__).parents[1] / "import_budget.json"
SPARE = 0.03
"""What falls by more than this part of its budget lowers the budget."""


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


@pytest.mark.compiler  # without, another attention is imported
@pytest.mark.parametrize("policy", IMPORTING)
def test_an_answer_imports_what_it_needs_and_no_more(policy: str) -> None:
    """What is not asked for is not there; nothing raises these numbers."""
    lines, budget = imported_lines(policy), json.loads(BUDGET.read_text())[policy]
    found = {"files": len(lines), "lines": sum(lines.values())}
    for what, most in budget.items():
        assert found[what] <= most, f"{policy}: more {what} than {BUDGET.name} allows"
        assert found[what] >= most * (1 - SPARE), f"{BUDGET.name}: lower {what} of {policy}"
