"""Links of the pages lead somewhere, on GitHub as on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

_FENCES = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def text_of(page: Path) -> str:
    return _FENCES.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Ids that GitHub gives to headings; mkdocs gives the same to all that the pages link to."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h) for h in _HEADING.findall(text_of(page)))
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(text_of(page)):
        target, _, anchor = link.partition("#")
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {link}"
