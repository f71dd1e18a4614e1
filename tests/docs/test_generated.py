"""The built pages: every generator runs, each page is in the site, and its links lead somewhere."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from docs.generate import pages
from tests.docs.pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def built() -> dict[str, str]:
    return pages.all_pages()


def test_every_page_is_in_the_site_and_none_else(built: dict[str, str]) -> None:
    nav = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert written.isdisjoint(built), "built pages are not kept"
    assert nav == written | built.keys()


def test_links_lead_somewhere(built: dict[str, str]) -> None:
    for name, text in built.items():
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
            assert ":" in link or target in built or (DOCS / target).exists(), (name, link)


def test_pages_of_the_reference_are_named_where_readers_look_for_them(
    built: dict[str, str],
) -> None:
    named = re.findall(r"<!-- built: (\S+) -->", (DOCS / "reference.md").read_text())
    assert set(named) == {name for name in built if not name.startswith("benchmarks/")}


def test_codes_of_troubleshooting_are_codes() -> None:
    page = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (?:\d{3}[^|]*)\|", page, re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    source = "".join(path.read_text() for path in Path(ROOT / "kvserve").rglob("*.py"))
    assert len(named) > 10
    assert {code for code in named if f'"{code}"' not in source} == set()
