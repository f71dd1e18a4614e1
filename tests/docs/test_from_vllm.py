"""The page "From vLLM": what it calls the same is accepted, what it calls absent refused."""

from __future__ import annotations

import re

import pytest

from kvserve import absent
from kvserve.server.cli.commands import parser_of
from kvserve.server.settings.args import REMOVED, UsageError
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


@pytest.mark.parametrize("flag", REMOVED)
def test_a_flag_that_was_removed_says_what_to_do(flag: str) -> None:
    assert flag not in KNOWN
    with pytest.raises(UsageError) as refused:
        parser_of("serve").parse([flag, "1"])
    assert str(refused.value) == f"{flag} was removed: {REMOVED[flag]}"
