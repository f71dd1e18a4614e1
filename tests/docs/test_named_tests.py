"""Every test that a page names exists."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT

DEFINED = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
}
PAGES = ["CONTRIBUTING.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_exist(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text()))
    assert named <= DEFINED, named - DEFINED
