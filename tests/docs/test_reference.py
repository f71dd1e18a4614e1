"""docs/reference is what the code says, and Troubleshooting names errors that exist."""

from __future__ import annotations

import re

from kvserve.server.reference import messages, pages
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_the_pages_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in REFERENCE.glob("*.md")}
    assert written == pages.all_pages(), "run `make docs`"


def test_messages_are_found() -> None:
    found = {text for _, text, _ in messages.refusals()}
    assert "--port must be between 0 and 65535, got {port}" in found
    assert "--max-num-seqs must be >= 1" in found  # of a table of checks
    assert "messages must not be empty" in found


def test_codes_of_troubleshooting_are_codes() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    named = {c for row in re.findall(r"^\| (?:\d{3}[^|]*)\|", page, re.M) for c in _codes(row)}
    source = "".join(p.read_text() for p in (ROOT / "kvserve").rglob("*.py"))
    assert len(named) > 10
    assert {code for code in named if f'"{code}"' not in source} == set()


def _codes(row: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", row)
