"""docs/policies.md is what the policies say of themselves."""

from __future__ import annotations

from pathlib import Path

from kvserve.engine.policies.registry import describe_policies
from kvserve.server.policies import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "policies.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(describe_policies()), "run `make docs`"
