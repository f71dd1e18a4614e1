"""The page "From vLLM": what it calls the same is accepted, what it calls absent refused."""

from __future__ import annotations

import re

import pytest

from kvserve import absent
from kvserve.server.cli.commands import parser_of
from tests.docs.pages import ROOT

_, SAME, _, DIFFERENT, GONE, _ = re.split(
    r"(?m)^## .*$", (ROOT / "docs" / "from-vllm.md").read_text()
)
KNOWN = parser_of("serve")._option_string_actions


def test_what_is_the_same_is_there() -> None:
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", SAME))
    assert len(named) >= 50 and named <= KNOWN.keys()


KINDS = ("SETTINGS", "FIELDS", "ATTRIBUTES", "EXPORTS")


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_that_is_absent_is_on_the_page(kind: str) -> None:
    tables = re.split(r"(?m)^### .*$", GONE)[1:]
    table = tables[KINDS.index(kind)]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    said = {name: why.removesuffix(" |") for named, why in rows for name in named.split("`")[1::2]}
    assert said == getattr(absent, kind)
