"""The page "From vLLM": what it calls the same is accepted, what it calls absent refused."""

from __future__ import annotations

import re

import pytest

from kvserve.server.cli.commands import parser_of
from kvserve.server.settings.args import UsageError
from kvserve.server.settings.vllm_flags import ABSENT, REMOVED
from tests.docs.pages import ROOT

_, SAME, DIFFERENT, GONE, _ = re.split(r"(?m)^## .*$", (ROOT / "docs" / "from-vllm.md").read_text())
KNOWN = parser_of("serve")._option_string_actions


def flags(text: str) -> set[str]:
    return set(re.findall(r"`(--?[a-z][a-z-]*)", text))


def test_what_is_the_same_is_there() -> None:
    named = flags(SAME)
    assert len(named) >= 50 and named <= KNOWN.keys()


def test_every_flag_that_is_absent_is_on_the_page() -> None:
    rows = [line.split(" | ") for line in GONE.splitlines() if line.startswith("| `")]
    said = {flag: why.removesuffix(" |") for named, why in rows for flag in flags(named)}
    assert said == ABSENT


@pytest.mark.parametrize("flag", ABSENT)
def test_a_flag_that_is_absent_says_why(flag: str) -> None:
    assert flag not in KNOWN
    with pytest.raises(UsageError) as refused:
        parser_of("serve").parse([flag, "1"])
    assert str(refused.value) == f"{flag} of vLLM is not here: {ABSENT[flag]}"
    for other in flags(ABSENT[flag].replace("see ", "`")):
        assert other in KNOWN, other


@pytest.mark.parametrize("flag", REMOVED)
def test_a_flag_that_was_removed_says_what_to_do(flag: str) -> None:
    assert flag not in KNOWN
    with pytest.raises(UsageError) as refused:
        parser_of("serve").parse([flag, "1"])
    assert str(refused.value) == f"{flag} was removed: {REMOVED[flag]}"
