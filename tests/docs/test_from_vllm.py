"""The page "From vLLM": what it calls the same is accepted."""

from __future__ import annotations

import re

from kvserve.server.cli.commands import parser_of
from tests.docs.pages import ROOT

SAME = re.split(r"(?m)^## .*$", (ROOT / "docs" / "from-vllm.md").read_text())[1]
KNOWN = parser_of("serve")._option_string_actions


def test_what_is_the_same_is_there() -> None:
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", SAME))
    assert len(named) >= 50 and named <= KNOWN.keys()
