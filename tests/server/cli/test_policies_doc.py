"""docs/policies.md and docs/compatibility.md are what the code says."""

from __future__ import annotations

from pathlib import Path

from kvserve.engine.policies.registry import describe_policies
from kvserve.server.cli import compatibility
from kvserve.server.cli.policies import markdown

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_is_up_to_date() -> None:
    assert (DOCS / "policies.md").read_text() == markdown(describe_policies()), "run `make docs`"


def test_the_compatibility_page_is_up_to_date() -> None:
    page = (DOCS / "compatibility.md").read_text()
    assert page == compatibility.markdown(), "run `make docs`"
